package forward

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Format writes the text form of a table, ports in the order of their names:
//
//	context IPv4 node=na zone=z1
//	  pods cidr=10.60.0.0/16
//	  host 10.20.0.11 127.0.0.1
//	  node-ports all loopback
//
//	port shop/web:https/tcp affinity=3h0m0s
//	  frontend load-balancer 203.0.113.9:443
//	    allow 198.51.100.0/24
//	    from pod forward cluster snat=hairpin
//	    from node forward cluster snat=always
//	    from any drop reason=NoLocalEndpoints
//	  frontend node-port *:30443
//	    from any forward cluster snat=always
//	  cluster 10.60.1.7:8443(local) 10.60.2.9:8443
//	  serving 10.60.1.7:8443 10.60.2.9:8443 10.60.3.4:8443
//
// The line "serving" is left out where it would repeat "cluster". Equal tables have equal texts.
func Format(w io.Writer, t *Table) error {
	b := bufio.NewWriter(w)
	t.Context.format(b)
	for _, n := range t.Names() {
		b.WriteByte('\n')
		t.ports[n].format(b)
	}
	if err := b.Flush(); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	return nil
}

// String gives the text form of a table; see Format.
func (t *Table) String() string {
	var b strings.Builder
	// A strings.Builder takes everything.
	_ = Format(&b, t)
	return b.String()
}

// String gives the port's part of the text form of a table.
func (p *Port) String() string {
	var b strings.Builder
	w := bufio.NewWriter(&b)
	p.format(w)
	_ = w.Flush()
	return b.String()
}

// The words at the start of the lines of the text form, and the options on them.
const (
	wordContext   = "context"
	wordPods      = "pods"
	wordHost      = "host"
	wordNodePorts = "node-ports"
	wordPort      = "port"
	wordFrontend  = "frontend"
	wordAllow     = "allow"
	wordFrom      = "from"
	wordCluster   = "cluster"
	wordLocal     = "local"
	wordServing   = "serving"

	wordAll      = "all"
	wordLoopback = "loopback"
	wordUnknown  = "unknown"
	wordNone     = "none"
	localMark    = "(local)"
	weightMark   = "*"

	fieldNode       = "node="
	fieldZone       = "zone="
	fieldCIDR       = "cidr="
	fieldInterface  = "interface="
	fieldPrefix     = "interface-prefix="
	fieldAffinity   = "affinity="
	fieldScheduler  = "scheduler="
	fieldHealth     = "health="
	fieldLocalReady = "local-ready="
)

func (c *Context) format(b *bufio.Writer) {
	fmt.Fprintf(b, "%s %s", wordContext, c.Family)
	option(b, fieldNode, c.NodeName)
	option(b, fieldZone, c.Zone)
	fmt.Fprintf(b, "\n  %s", wordPods)
	switch d := c.Detector; {
	case d.CIDR.IsValid():
		option(b, fieldCIDR, d.CIDR.String())
	case d.Interface != "":
		option(b, fieldInterface, d.Interface)
	case d.InterfacePrefix != "":
		option(b, fieldPrefix, d.InterfacePrefix)
	default:
		b.WriteString(" " + wordUnknown)
	}
	fmt.Fprintf(b, "\n  %s", wordHost)
	list(b, c.HostAddrs, netip.Addr.String)
	fmt.Fprintf(b, "\n  %s", wordNodePorts)
	if c.NodePorts.All {
		b.WriteString(" " + wordAll)
	}
	list(b, c.NodePorts.Addrs, netip.Addr.String)
	if c.NodePorts.Loopback {
		b.WriteString(" " + wordLoopback)
	}
	b.WriteByte('\n')
}

func (p *Port) format(b *bufio.Writer) {
	b.WriteString(wordPort)
	option(b, "", p.Name.String())
	if p.Affinity != 0 {
		option(b, fieldAffinity, p.Affinity.String())
	}
	option(b, fieldScheduler, p.Scheduler)
	if p.HealthCheckNodePort != 0 {
		option(b, fieldHealth, strconv.Itoa(int(p.HealthCheckNodePort)))
		option(b, fieldLocalReady, strconv.Itoa(p.LocalReady))
	}
	b.WriteByte('\n')
	for i := range p.Frontends {
		p.Frontends[i].format(b)
	}
	endpoints := func(word string, pool []Endpoint) {
		if len(pool) > 0 {
			b.WriteString("  " + word)
			list(b, pool, Endpoint.String)
			b.WriteByte('\n')
		}
	}
	endpoints(wordCluster, p.Cluster)
	endpoints(wordLocal, p.Local)
	if !slices.EqualFunc(p.Serving, p.Cluster, func(a netip.AddrPort, e Endpoint) bool { return a == e.AddrPort }) {
		b.WriteString("  " + wordServing)
		list(b, p.Serving, netip.AddrPort.String)
		b.WriteByte('\n')
	}
}

func (f *Frontend) format(b *bufio.Writer) {
	fmt.Fprintf(b, "  %s %s %s\n", wordFrontend, f.Kind, f.address())
	if f.Filtered {
		b.WriteString("    " + wordAllow)
		if len(f.Allow) == 0 {
			b.WriteString(" " + wordNone)
		}
		list(b, f.Allow, netip.Prefix.String)
		b.WriteByte('\n')
	}
	for _, r := range f.Routes {
		fmt.Fprintf(b, "    %s\n", r)
	}
}

// String gives "address:port", with "(local)" after an endpoint on this node, and "*3" after one of weight 3.
func (e Endpoint) String() string {
	text := e.AddrPort.String()
	if e.Local {
		text += localMark
	}
	if e.Weight != 0 {
		text += weightMark + strconv.Itoa(int(e.Weight))
	}
	return text
}

// String gives the route's line in the text form: "from any forward cluster snat=always".
func (r Route) String() string {
	if r.Do == Forward {
		return fmt.Sprintf("%s %s %s %s %s%s", wordFrom, r.From, r.Do, r.Pool, snatField, r.SNAT)
	}
	return fmt.Sprintf("%s %s %s %s%s", wordFrom, r.From, r.Do, reasonField, r.Reason)
}

// address gives "address:port", with "*" for the address of a node port.
func (f *Frontend) address() string {
	if f.Addr.IsValid() {
		return netip.AddrPortFrom(f.Addr, f.Port).String()
	}
	return "*:" + strconv.Itoa(int(f.Port))
}

// option writes one word of a line, or nothing for an empty value. A value that would not be one word, as names in
// files that no API server has seen may not be, is quoted.
func option(b *bufio.Writer, field, value string) {
	if value == "" {
		return
	}
	b.WriteByte(' ')
	b.WriteString(field)
	b.WriteString(word(value))
}

func word(s string) string {
	odd := func(r rune) bool {
		return unicode.IsSpace(r) || !unicode.IsPrint(r) || r == '"' || r == '\\' || r == unicode.ReplacementChar
	}
	if strings.ContainsFunc(s, odd) {
		return strconv.Quote(s)
	}
	return s
}

func list[T any](b *bufio.Writer, items []T, text func(T) string) {
	for _, item := range items {
		b.WriteByte(' ')
		b.WriteString(text(item))
	}
}
