package iptables

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/turnout-proxy/turnout/internal/backend"
	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/xtables"
)

// Rows implements backend.Observed: it reads frontends and endpoints back from the chains alone, those of upstream's
// layout too.
func (o *Observation) Rows() []backend.Row {
	r := reader{o: o}
	r.frontends(tableNAT, chainServices, map[string]bool{})
	r.frontends(tableNAT, chainNodePorts, map[string]bool{})
	for _, chain := range []string{chainServices, chainExternal, chainExternalNodePort} {
		r.frontends(tableFilter, chain, map[string]bool{})
	}
	slices.SortStableFunc(r.rows, func(a, b backend.Row) int {
		return cmp.Or(cmp.Compare(a.Service, b.Service), cmp.Compare(a.Proto, b.Proto), cmp.Compare(a.Frontend, b.Frontend))
	})
	return r.rows
}

// reader collects rows from chains.
type reader struct {
	o    *Observation
	rows []backend.Row
}

// parsed gives the rules of a chain; what cannot be read is left out.
func (r *reader) parsed(table, chain string) []*xtables.Rule {
	var out []*xtables.Rule
	for text := range r.o.Chains[ruleset.In(table, chain)].Rules() {
		if rule, err := xtables.ParseRule(r.o.opt.Family, text); err == nil {
			out = append(out, rule)
		}
	}
	return out
}

// frontends walks over a root chain and the chains that it is split into.
func (r *reader) frontends(table, chain string, seen map[string]bool) {
	if seen[chain] {
		return
	}
	seen[chain] = true
	for _, rule := range r.parsed(table, chain) {
		to := rule.Target.Name
		if strings.HasPrefix(to, prefixDispatch) {
			r.frontends(table, to, seen)
			continue
		}
		port := portOf(rule)
		if port == 0 || rule.Dst.Prefix.IsValid() && !rule.Dst.Prefix.IsSingleIP() {
			continue // upstream counts loopback clients of a node port by a rule of its own
		}
		row := backend.Row{Proto: rule.Proto, Frontend: frontendText(rule, port)}
		row.Service, row.Kind = nameOf(rule.Comment())
		switch {
		case table == tableFilter && (to == "REJECT" || to == "DROP"):
			row.Do, row.Reason = strings.ToLower(to), ruleset.ReasonOf(rule.Comment()).String()
		case table == tableNAT && (strings.HasPrefix(to, prefixService) || strings.HasPrefix(to, prefixLocal) ||
			strings.HasPrefix(to, prefixExternal) || strings.HasPrefix(to, prefixFirewall)):
			row.Do = "forward"
			r.resolve(to, &row)
		default:
			continue
		}
		r.rows = append(r.rows, row)
	}
}

func portOf(rule *xtables.Rule) uint16 {
	o, ok := rule.Option(rule.Proto, "--dport")
	if !ok || len(o.Values) == 0 {
		return 0
	}
	port, err := strconv.ParseUint(o.Values[0], 10, 16)
	if err != nil {
		return 0
	}
	return uint16(port)
}

func frontendText(rule *xtables.Rule, port uint16) string {
	if !rule.Dst.Prefix.IsValid() {
		return "*:" + strconv.Itoa(int(port))
	}
	return netip.AddrPortFrom(rule.Dst.Prefix.Addr(), port).String()
}

// nameOf takes a rule's comment apart.
func nameOf(comment string) (service, kind string) {
	service, rest, _ := strings.Cut(comment, " ")
	switch rest {
	case "cluster IP":
		return service, "cluster-ip"
	case "external IP":
		return service, "external-ip"
	case "loadbalancer IP":
		return service, "load-balancer"
	case "":
		return service, "node-port"
	}
	return service, ""
}

// resolve fills in what stands behind a frontend's chain.
func (r *reader) resolve(chain string, row *backend.Row) {
	if strings.HasPrefix(chain, prefixFirewall) {
		if chain = r.filter(chain, row); chain == "" {
			row.Do, row.Reason = "drop", forward.SourceNotAllowed.String()
			return
		}
	}
	pools := []string{chain}
	if strings.HasPrefix(chain, prefixExternal) {
		pools = pools[:0]
		for _, rule := range r.parsed(tableNAT, chain) {
			to := rule.Target.Name
			if (strings.HasPrefix(to, prefixService) || strings.HasPrefix(to, prefixLocal)) && !slices.Contains(pools, to) {
				pools = append(pools, to)
			}
		}
	}
	for _, pool := range pools {
		endpoints := r.pool(pool, 1, row)
		if strings.HasPrefix(pool, prefixLocal) && len(pools) > 1 {
			row.LocalEndpoints = endpoints
		} else {
			row.Endpoints = endpoints
		}
	}
}

// filter fills in who is admitted by a chain of source ranges and gives the chain behind it. A filter that lets nobody
// in does not tell where it would lead.
func (r *reader) filter(chain string, row *backend.Row) (behind string) {
	for _, rule := range r.parsed(tableNAT, chain) {
		if rule.Target.Name != "" {
			row.Allow, behind = append(row.Allow, rule.Src.Prefix), rule.Target.Name
		}
	}
	return behind
}

// pool gives the endpoints behind a chain with their shares of all connections that enter it, which get the given share.
func (r *reader) pool(chain string, share float64, row *backend.Row) []backend.RowEndpoint {
	var out []backend.RowEndpoint
	left := share
	for _, rule := range r.parsed(tableNAT, chain) {
		if o, ok := rule.Option("recent", "--rcheck"); ok && !o.Not {
			seconds, _ := rule.Option("recent", "--seconds")
			if n, err := strconv.Atoi(strings.Join(seconds.Values, "")); err == nil {
				row.Affinity = time.Duration(n) * time.Second
			}
			continue
		}
		part := left
		if o, ok := rule.Option("statistic", "--probability"); ok && len(o.Values) == 1 {
			if p, err := strconv.ParseFloat(o.Values[0], 64); err == nil {
				part = left * p
			}
		}
		switch to := rule.Target; {
		case to.Name == "DNAT":
			if ep, err := netip.ParseAddrPort(to.Value("--to-destination")); err == nil {
				out = append(out, backend.RowEndpoint{Addr: ep, Share: part})
				left -= part
			}
		case strings.HasPrefix(to.Name, prefixEndpoint): // an endpoint's own chain, or that of a group
			out = append(out, r.pool(to.Name, part, row)...)
			left -= part
		}
	}
	return out
}
