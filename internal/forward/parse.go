package forward

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/turnout-proxy/turnout/internal/model"
)

// maxLine is the longest line that Parse takes, in bytes: a pool of some hundred thousand endpoints.
const maxLine = 16 << 20

// Parse reads the text form that Format writes. Empty lines and lines that start with "#" say nothing, and indentation
// does not count. An error names the line.
func Parse(r io.Reader) (*Table, error) {
	p := parser{table: &Table{ports: map[PortName]*Port{}, index: map[Key]PortName{}}, book: routeBook{}}
	scan := bufio.NewScanner(r)
	scan.Buffer(nil, maxLine)
	line := 0
	for scan.Scan() {
		line++
		if err := p.line(line, scan.Text()); err != nil {
			return nil, fmt.Errorf("line %d: %w", line, err)
		}
	}
	if err := scan.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", line+1, err)
	}
	if err := p.endPort(); err != nil {
		return nil, err
	}
	if p.table.Context.Family == 0 {
		return nil, errors.New(`no "context" line: a table starts with one`)
	}
	return p.table, nil
}

// A parser is in the middle of a table.
type parser struct {
	table *Table
	book  routeBook
	// port is the Service port that lines belong to, nil in the context; it began at line start.
	port    *Port
	start   int
	serving bool
	// open tells that allow and from lines may follow; they belong to the last frontend of port, with routes so far.
	open   bool
	routes routeSet
}

// line takes one line.
func (p *parser) line(number int, text string) error {
	text = strings.TrimSpace(text)
	if text == "" || strings.HasPrefix(text, "#") {
		return nil
	}
	words, err := splitWords(text)
	if err != nil {
		return err
	}
	key, args := words[0], words[1:]
	switch key {
	case wordContext:
		return p.context(args)
	case wordPort:
		if err := p.endPort(); err != nil {
			return err
		}
		p.start = number
		return p.beginPort(args)
	}
	if p.table.Context.Family == 0 {
		return fmt.Errorf("%q before the context line", key)
	}
	if p.port == nil {
		return p.contextLine(key, args)
	}
	return p.portLine(key, args)
}

// splitWords separates a line at its spaces. The end of a word may be quoted as in Go, and then contain any.
func splitWords(text string) ([]string, error) {
	var words []string
	for {
		text = strings.TrimLeftFunc(text, unicode.IsSpace)
		if text == "" {
			return words, nil
		}
		w, rest, err := firstWord(text)
		if err != nil {
			return nil, err
		}
		words, text = append(words, w), rest
	}
}

// firstWord cuts the first word off a text that starts with one.
func firstWord(text string) (word, rest string, err error) {
	end := strings.IndexFunc(text, func(r rune) bool { return unicode.IsSpace(r) || r == '"' })
	if end < 0 {
		return text, "", nil
	}
	word, rest = text[:end], text[end:]
	if rest[0] != '"' {
		return word, rest, nil
	}
	quoted, err := strconv.QuotedPrefix(rest)
	if err != nil {
		return "", "", fmt.Errorf("quoted text %s has no end", shortText(rest))
	}
	plain, err := strconv.Unquote(quoted)
	if err != nil {
		return "", "", fmt.Errorf("quoted text %s: %w", shortText(quoted), err)
	}
	rest = rest[len(quoted):]
	if next, _ := utf8.DecodeRuneInString(rest); rest != "" && !unicode.IsSpace(next) {
		return "", "", fmt.Errorf("quoted text %s is followed by more text; separate words by a space", shortText(quoted))
	}
	return word + plain, rest, nil
}

// shortText keeps an error on a screen line.
func shortText(s string) string {
	const most = 40
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// context takes the line "context FAMILY node=NAME zone=ZONE".
func (p *parser) context(args []string) error {
	c := &p.table.Context
	if c.Family != 0 {
		return errors.New("a second context line; a table has one")
	}
	if len(args) == 0 {
		return errors.New("context without a family; write IPv4 or IPv6")
	}
	family, err := parse("family", args[0], model.IPv4, model.IPv6)
	if err != nil {
		return err
	}
	c.Family = family
	for _, a := range args[1:] {
		if v, ok := strings.CutPrefix(a, fieldNode); ok {
			c.NodeName = v
		} else if v, ok := strings.CutPrefix(a, fieldZone); ok {
			c.Zone = v
		} else {
			return fmt.Errorf("context has no option %q; it has %s and %s", a, fieldNode, fieldZone)
		}
	}
	return nil
}

// contextLine takes a line that belongs to the context.
func (p *parser) contextLine(key string, args []string) error {
	c := &p.table.Context
	var err error
	switch key {
	case wordPods:
		c.Detector, err = p.detector(args)
	case wordHost:
		c.HostAddrs, err = p.addrs(args)
	case wordNodePorts:
		c.NodePorts, err = p.scope(args)
	default:
		return fmt.Errorf("%q does not belong to the context", key)
	}
	return err
}

func (p *parser) detector(args []string) (Detector, error) {
	if len(args) != 1 {
		return Detector{}, fmt.Errorf("pods takes one word, not %d", len(args))
	}
	if v, ok := strings.CutPrefix(args[0], fieldCIDR); ok {
		prefix, err := p.prefix(v)
		return Detector{CIDR: prefix}, err
	}
	if v, ok := strings.CutPrefix(args[0], fieldInterface); ok && v != "" {
		return Detector{Interface: v}, nil
	}
	if v, ok := strings.CutPrefix(args[0], fieldPrefix); ok && v != "" {
		return Detector{InterfacePrefix: v}, nil
	}
	if args[0] == wordUnknown {
		return Detector{}, nil
	}
	return Detector{}, fmt.Errorf("pods %q is not cidr=, interface=, interface-prefix= with a value, or unknown", args[0])
}

func (p *parser) scope(args []string) (NodePortScope, error) {
	var s NodePortScope
	var rest []string
	for _, a := range args {
		switch a {
		case wordAll:
			s.All = true
		case wordLoopback:
			s.Loopback = true
		default:
			rest = append(rest, a)
		}
	}
	if s.All && len(rest) > 0 {
		return s, errors.New("node-ports are on all addresses or on some, not both")
	}
	addrs, err := p.addrs(rest)
	s.Addrs = addrs
	return s, err
}

// addrs reads addresses of the table's family and sorts them.
func (p *parser) addrs(words []string) ([]netip.Addr, error) {
	var list []netip.Addr
	for _, w := range words {
		a, err := netip.ParseAddr(w)
		if err != nil {
			return nil, fmt.Errorf("%q is not an IP address", w)
		}
		if err := p.check(a); err != nil {
			return nil, err
		}
		list = append(list, a)
	}
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list), nil
}

// check refuses addresses that cannot be in a table of this family.
func (p *parser) check(a netip.Addr) error {
	switch family := p.table.Context.Family; {
	case a.Is4In6() || a.Zone() != "":
		return fmt.Errorf("address %s is not plain; write it without a zone, and an IPv4 one with dots only", a)
	case model.FamilyOf(a) != family:
		return fmt.Errorf("address %s is not of the table's family %s", a, family)
	}
	return nil
}

func (p *parser) prefix(s string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(s)
	if err != nil {
		return prefix, fmt.Errorf("%q is not a CIDR", s)
	}
	if prefix != prefix.Masked() {
		return prefix, fmt.Errorf("CIDR %s has bits set behind its prefix; write %s", prefix, prefix.Masked())
	}
	return prefix, p.check(prefix.Addr())
}

func (p *parser) addrPort(s string) (netip.AddrPort, error) {
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		return a, fmt.Errorf("%q is not address:port", s)
	}
	if a.Port() == 0 {
		return a, fmt.Errorf("port of %s is 0", s)
	}
	return a, p.check(a.Addr())
}

// ParsePortName reads what PortName.String writes: "namespace/service:port/protocol".
func ParsePortName(s string) (PortName, error) {
	bad := fmt.Errorf("port name %q is not namespace/service:port/protocol", s)
	namespace, rest, ok := strings.Cut(s, "/")
	slash := strings.LastIndexByte(rest, '/')
	if !ok || slash < 0 {
		return PortName{}, bad
	}
	proto, err := model.ParseProtocol(rest[slash+1:])
	name, port, _ := strings.Cut(rest[:slash], ":")
	if namespace == "" || name == "" || err != nil || rest[slash+1:] == "" {
		return PortName{}, bad
	}
	return PortName{Name: model.Name{Namespace: namespace, Name: name}, Port: port, Proto: proto}, nil
}

// beginPort takes the line "port NAME affinity=DURATION health=PORT local-ready=N".
func (p *parser) beginPort(args []string) error {
	if p.table.Context.Family == 0 {
		return errors.New("port before the context line")
	}
	if len(args) == 0 {
		return errors.New("port without a name")
	}
	name, err := ParsePortName(args[0])
	if err != nil {
		return err
	}
	if p.table.ports[name] != nil {
		return fmt.Errorf("port %s is there a second time", name)
	}
	p.port = &Port{Name: name}
	p.table.ports[name] = p.port
	for _, a := range args[1:] {
		if err := p.portOption(a); err != nil {
			return fmt.Errorf("port %s: %w", name, err)
		}
	}
	return nil
}

func (p *parser) portOption(word string) error {
	if v, ok := strings.CutPrefix(word, fieldAffinity); ok {
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 {
			return fmt.Errorf("affinity %q is not a duration like 3h", v)
		}
		p.port.Affinity = d
		return nil
	}
	if v, ok := strings.CutPrefix(word, fieldScheduler); ok {
		p.port.Scheduler = v
		return nil
	}
	if v, ok := strings.CutPrefix(word, fieldHealth); ok {
		n, err := strconv.ParseUint(v, 10, 16)
		if err != nil || n == 0 {
			return fmt.Errorf("health %q is not a port number", v)
		}
		p.port.HealthCheckNodePort = uint16(n)
		return nil
	}
	if v, ok := strings.CutPrefix(word, fieldLocalReady); ok {
		n, err := strconv.ParseUint(v, 10, 31)
		if err != nil {
			return fmt.Errorf("local-ready %q is not a number", v)
		}
		p.port.LocalReady = int(n)
		return nil
	}
	return fmt.Errorf("no option %q; there are %s, %s, %s and %s", word, fieldAffinity, fieldScheduler, fieldHealth,
		fieldLocalReady)
}

// portLine takes a line that belongs to a port.
func (p *parser) portLine(key string, args []string) error {
	if p.open && (key == wordAllow || key == wordFrom) {
		if key == wordAllow {
			return p.allow(args)
		}
		return p.route(args)
	}
	if err := p.endFrontend(); err != nil {
		return err
	}
	var err error
	switch key {
	case wordFrontend:
		return p.frontend(args)
	case wordCluster:
		p.port.Cluster, err = p.pool(p.port.Cluster, args)
	case wordLocal:
		p.port.Local, err = p.pool(p.port.Local, args)
	case wordServing:
		return p.servingLine(args)
	default:
		return fmt.Errorf("%q does not belong here", key)
	}
	return err
}

// frontend takes the line "frontend KIND ADDRESS:PORT".
func (p *parser) frontend(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("frontend takes a kind and an address, not %d words", len(args))
	}
	kind, err := parse("kind", args[0], ClusterIP, ExternalIP, LoadBalancer, NodePort)
	if err != nil {
		return err
	}
	f := Frontend{Kind: kind}
	if number, everywhere := strings.CutPrefix(args[1], "*:"); kind == NodePort {
		n, err := strconv.ParseUint(number, 10, 16)
		if !everywhere || err != nil || n == 0 {
			return fmt.Errorf("node port %q is not *:port", args[1])
		}
		f.Port = uint16(n)
	} else {
		addr, err := p.addrPort(args[1])
		if err != nil {
			return err
		}
		f.Addr, f.Port = addr.Addr(), addr.Port()
	}
	key := f.Key(p.port.Name.Proto)
	if owner, taken := p.table.index[key]; taken {
		return fmt.Errorf("frontend %s is there already, at port %s", f.address(), owner)
	}
	p.table.index[key] = p.port.Name
	p.port.Frontends = append(p.port.Frontends, f)
	p.open = true
	return nil
}

func (p *parser) allow(args []string) error {
	f := &p.port.Frontends[len(p.port.Frontends)-1]
	if f.Filtered {
		return errors.New("a second allow line; a frontend has one")
	}
	f.Filtered = true
	if len(args) == 1 && args[0] == wordNone {
		return nil
	}
	if len(args) == 0 {
		return fmt.Errorf("allow without a CIDR; write %q to admit nobody", wordNone)
	}
	for _, a := range args {
		prefix, err := p.prefix(a)
		if err != nil {
			return err
		}
		f.Allow = append(f.Allow, prefix)
	}
	slices.SortFunc(f.Allow, netip.Prefix.Compare)
	f.Allow = slices.Compact(f.Allow)
	return nil
}

// route takes the lines "from CLASS forward POOL snat=MODE" and "from CLASS VERDICT reason=REASON".
func (p *parser) route(args []string) error {
	if p.routes.n == len(p.routes.list) {
		return fmt.Errorf("a frontend has at most %d routes", len(p.routes.list))
	}
	if len(args) < 3 {
		return errors.New("a route is: from CLASS forward POOL snat=MODE, or: from CLASS VERDICT reason=REASON")
	}
	from, err := parse("class", args[0], Pod, Node, Any)
	if err != nil {
		return err
	}
	do, err := parse("verdict", args[1], Forward, Reject, Drop)
	if err != nil {
		return err
	}
	r := Route{From: from, Do: do}
	if do != Forward {
		reason, ok := strings.CutPrefix(args[2], reasonField)
		if !ok || len(args) != 3 {
			return fmt.Errorf("%s takes reason= and nothing else", do)
		}
		if r.Reason, err = parseReason(reason); err != nil {
			return err
		}
		p.routes.add(r)
		return nil
	}
	if r.Pool, err = parse("pool", args[2], ClusterPool, LocalPool); err != nil {
		return err
	}
	if len(args) != 4 || !strings.HasPrefix(args[3], snatField) {
		return errors.New("forward takes a pool and snat=")
	}
	if r.SNAT, err = parse("snat", args[3][len(snatField):], Hairpin, Always); err != nil {
		return err
	}
	p.routes.add(r)
	return nil
}

// pool reads endpoints and sorts them as the builder does.
func (p *parser) pool(have []Endpoint, args []string) ([]Endpoint, error) {
	if have != nil {
		return nil, errors.New("a second line for this pool")
	}
	list := make([]Endpoint, 0, len(args))
	for _, a := range args {
		text, share, weighted := strings.Cut(a, weightMark)
		weight, err := strconv.ParseUint(share, 10, 16)
		if weighted && (err != nil || weight == 0) {
			return nil, fmt.Errorf("endpoint %q: the weight is not a number from 1 to 65535", a)
		}
		text, local := strings.CutSuffix(text, localMark)
		addr, err := p.addrPort(text)
		if err != nil {
			return nil, err
		}
		list = append(list, Endpoint{AddrPort: addr, Local: local, Weight: uint16(weight)})
	}
	slices.SortFunc(list, func(a, b Endpoint) int { return compareText(a.AddrPort, b.AddrPort) })
	for i := 1; i < len(list); i++ {
		if list[i].AddrPort == list[i-1].AddrPort {
			return nil, fmt.Errorf("endpoint %s is there twice", list[i].AddrPort)
		}
	}
	return list, nil
}

func compareText(a, b netip.AddrPort) int { return strings.Compare(a.String(), b.String()) }

func (p *parser) servingLine(args []string) error {
	if p.serving {
		return errors.New("a second serving line; a port has one")
	}
	p.serving = true
	for _, a := range args {
		addr, err := p.addrPort(a)
		if err != nil {
			return err
		}
		p.port.Serving = append(p.port.Serving, addr)
	}
	slices.SortFunc(p.port.Serving, compareText)
	p.port.Serving = slices.Compact(p.port.Serving)
	return nil
}

// endFrontend completes the last frontend.
func (p *parser) endFrontend() error {
	if !p.open {
		return nil
	}
	f := &p.port.Frontends[len(p.port.Frontends)-1]
	if p.routes.n == 0 {
		return fmt.Errorf("frontend %s has no route", f.address())
	}
	f.Routes = p.book.routes(p.routes)
	p.open, p.routes = false, routeSet{}
	return nil
}

// endPort completes the last port and checks what only the whole of it shows.
func (p *parser) endPort() error {
	port := p.port
	if port == nil {
		return nil
	}
	err := p.endFrontend()
	for _, pool := range []Pool{ClusterPool, LocalPool} {
		if used, has := port.Uses(pool), len(port.Endpoints(pool)) > 0; err == nil && used != has {
			err = fmt.Errorf("pool %s must have endpoints if a route forwards to it, and only then", pool)
		}
	}
	if err == nil && len(port.Frontends) == 0 && port.HealthCheckNodePort == 0 {
		err = errors.New("neither a frontend nor a health check port")
	}
	if err == nil && port.LocalReady != 0 && port.HealthCheckNodePort == 0 {
		err = errors.New("local-ready goes with health only")
	}
	if err != nil {
		return fmt.Errorf("port %s from line %d: %w", port.Name, p.start, err)
	}
	if !p.serving {
		for _, e := range port.Cluster {
			port.Serving = append(port.Serving, e.AddrPort)
		}
	}
	p.port, p.serving = nil, false
	return nil
}
