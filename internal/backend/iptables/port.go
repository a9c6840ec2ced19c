package iptables

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/backend/ruleset"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
)

// The dispatch trees, one for each chain that frontends are looked up in.
const (
	treeServices = iota // nat: cluster IPs, external IPs, load balancer addresses
	treeNodePorts
	treeRefused  // filter: cluster IPs that are refused
	treeExternal // filter: external addresses that are refused
	treeExternalNodePorts
	treeFirewall    // filter: what source ranges do not admit
	treeHealthCheck // filter: health check ports are let in
	trees
)

// A rendering is what one Service port adds to the program.
type rendering struct {
	chains map[ruleset.ID]ruleset.Body
	// dispatch are its rules in the trees.
	dispatch []placed
}

// A placed rule is one entry of a dispatch tree.
type placed struct {
	tree int
	key  string
	rule string
}

// renderer writes the rules of one Service port.
type renderer struct {
	opt     Options
	ctx     *forward.Context
	compact bool
	port    *forward.Port
	name    string
	hash    string
	proto   string
	out     rendering
}

// render gives the chains and dispatch rules of a Service port, or the reason why its routes cannot be expressed.
func render(opt Options, ctx *forward.Context, compact bool, p *forward.Port) (rendering, error) {
	r := renderer{
		opt: opt, ctx: ctx, compact: compact, port: p,
		name: p.Name.Service(), hash: portHash(p.Name), proto: p.Name.Proto.String(),
		out: rendering{chains: map[ruleset.ID]ruleset.Body{}},
	}
	var errs []error
	for i := range p.Frontends {
		f := &p.Frontends[i]
		if f.Kind == forward.ClusterIP {
			errs = append(errs, r.clusterIP(f))
		} else {
			errs = append(errs, r.external(f))
		}
	}
	for _, pool := range []forward.Pool{forward.ClusterPool, forward.LocalPool} {
		if p.Uses(pool) {
			r.pool(pool)
		}
	}
	if hc := p.HealthCheckNodePort; hc != 0 {
		r.place(treeHealthCheck, forward.Key{Port: hc, Proto: model.TCP}, "-p tcp "+
			ruleset.Comment(r.name+" health check node port")+"-m tcp --dport "+strconv.Itoa(int(hc))+" -j ACCEPT")
	}
	return r.out, errors.Join(errs...)
}

func (r *renderer) place(tree int, k forward.Key, rule string) {
	r.out.dispatch = append(r.out.dispatch, placed{tree: tree, key: keyOf(k), rule: rule})
}

func (r *renderer) add(name string, rules ...string) {
	id := ruleset.In(tableNAT, name)
	if have := r.out.chains[id]; have != "" {
		rules = append([]string{string(have)}, rules...)
	}
	r.out.chains[id] = ruleset.BodyOf(rules...)
}

// keyOf gives the tree key of a frontend.
func (r *renderer) key(f *forward.Frontend) forward.Key {
	return forward.Key{Addr: f.Addr, Port: f.Port, Proto: r.port.Name.Proto}
}

// at gives a rule for packets to a frontend.
func (r *renderer) at(f *forward.Frontend, text, target string) string {
	rule := ""
	if f.Addr.IsValid() {
		rule = "-d " + ruleset.Host(f.Addr) + " "
	}
	return rule + "-p " + r.proto + " " + ruleset.Comment(text) + "-m " + r.proto + " --dport " +
		strconv.Itoa(int(f.Port)) + " " + target
}

// refusal gives the target and the comment of a frontend that is not forwarded.
func (r *renderer) refusal(route forward.Route) (text, target string) {
	text = r.name + " has no endpoints"
	if route.Reason == forward.NoLocalEndpoints {
		text = r.name + " has no local endpoints"
	}
	if route.Do == forward.Drop {
		return text, "-j DROP"
	}
	if r.opt.Family == model.IPv6 {
		return text, "-j REJECT --reject-with icmp6-port-unreachable"
	}
	return text, "-j REJECT --reject-with icmp-port-unreachable"
}

// clusterIP leads a cluster IP straight to its pool's chain. Which clients are masqueraded is told there, by rules that
// match the cluster IP, as upstream does: traffic that comes by an external address passes them by.
func (r *renderer) clusterIP(f *forward.Frontend) error {
	last := f.Routes[len(f.Routes)-1]
	if last.Do != forward.Forward {
		if len(f.Routes) != 1 {
			return fmt.Errorf("cluster IP %s: refused for some clients only", f.Addr)
		}
		text, target := r.refusal(last)
		r.place(treeRefused, r.key(f), r.at(f, text, target))
		return nil
	}
	masq, err := r.clusterIPMasquerade(f)
	if err != nil {
		return err
	}
	chain := poolChain(r.port.Name, last.Pool)
	r.place(treeServices, r.key(f), r.at(f, r.name+" cluster IP", "-j "+chain))
	if masq != "" {
		r.add(chain, masq)
	}
	return nil
}

// clusterIPMasquerade gives the rule that masks the clients of a cluster IP; "" if none are.
func (r *renderer) clusterIPMasquerade(f *forward.Frontend) (string, error) {
	last := f.Routes[len(f.Routes)-1]
	pod, known := ruleset.FromPod(r.ctx.Detector)
	not := ""
	switch {
	case len(f.Routes) == 1 && last.SNAT == forward.Hairpin:
		return "", nil
	case len(f.Routes) == 1:
	case len(f.Routes) == 2 && known && f.Routes[0].From == forward.Pod && f.Routes[0].SNAT == forward.Hairpin &&
		f.Routes[0].Do == forward.Forward && f.Routes[0].Pool == last.Pool && last.SNAT == forward.Always:
		not = "! " + pod
	default:
		return "", fmt.Errorf("cluster IP %s: routes %v have no form in this mode", f.Addr, f.Routes)
	}
	// The tools print a source before the destination and an interface behind it.
	match := not + "-d " + ruleset.Host(f.Addr) + " "
	if strings.HasPrefix(pod, "-i") {
		match = "-d " + ruleset.Host(f.Addr) + " " + not
	}
	if r.compact {
		return match + "-j " + chainMarkMasq, nil
	}
	return match + "-p " + r.proto + " " + ruleset.Comment(r.name+" cluster IP") + "-m " + r.proto + " --dport " +
		strconv.Itoa(int(f.Port)) + " -j " + chainMarkMasq, nil
}

// external leads an address that clients outside use to the chain EXT, by way of FW if it is filtered. What EXT does
// not forward falls through to the filter table.
func (r *renderer) external(f *forward.Frontend) error {
	last := f.Routes[len(f.Routes)-1]
	refusedTree, tree := treeExternal, treeServices
	label := map[forward.Kind]string{forward.ExternalIP: " external IP", forward.LoadBalancer: " loadbalancer IP"}[f.Kind]
	if f.Kind == forward.NodePort {
		refusedTree, tree = treeExternalNodePorts, treeNodePorts
	}
	if last.Do != forward.Forward {
		text, target := r.refusal(last)
		r.place(refusedTree, r.key(f), r.at(f, text, target))
		if len(f.Routes) == 1 && last.Do == forward.Reject {
			return nil
		}
	}
	ext := prefixExternal + r.hash
	if err := r.externalChain(ext, f.Routes); err != nil {
		return fmt.Errorf("%s %s: %w", f.Kind, f.Addr, err)
	}
	if f.Filtered {
		fw := r.firewallChain(f, ext)
		r.place(treeFirewall, r.key(f), r.at(f, r.name+" traffic not accepted by "+fw, "-j DROP"))
		ext = fw
	}
	r.place(tree, r.key(f), r.at(f, r.name+label, "-j "+ext))
	return nil
}

// externalChain writes EXT from the routes. Every external frontend of a Service port has the same ones.
func (r *renderer) externalChain(chain string, routes []forward.Route) error {
	var rules []string
	for _, route := range routes {
		match, ok, who := "", true, ""
		switch route.From {
		case forward.Pod:
			match, ok = ruleset.FromPod(r.ctx.Detector)
			who = "pod"
		case forward.Node:
			match, who = "-m addrtype --src-type LOCAL ", "LOCAL"
		case forward.Any:
		}
		if !ok {
			return fmt.Errorf("route %v: pods cannot be told from others", route)
		}
		if route.Do != forward.Forward {
			if route.From != forward.Any {
				return fmt.Errorf("route %v has no form in this mode", route)
			}
			continue
		}
		rules = append(rules, r.externalRoute(route, match, who)...)
	}
	want := ruleset.BodyOf(rules...)
	id := ruleset.In(tableNAT, chain)
	if have, ok := r.out.chains[id]; ok && have != want {
		return errors.New("external addresses with different routes have no form in this mode")
	}
	r.out.chains[id] = want
	return nil
}

func (r *renderer) externalRoute(route forward.Route, match, who string) []string {
	target := "-j " + poolChain(r.port.Name, route.Pool)
	// An address stands before the comment and a match module behind it.
	line := func(text, target string) string {
		if text == "" {
			return match + target
		}
		if strings.HasPrefix(match, "-m") {
			return ruleset.Comment(text) + match + target
		}
		return match + ruleset.Comment(text) + target
	}
	var rules []string
	text := ""
	switch {
	case who == "":
		if route.SNAT == forward.Always {
			rules = append(rules, line("masquerade traffic for "+r.name+" external destinations", "-j "+chainMarkMasq))
		}
	case route.SNAT == forward.Always:
		rules = append(rules, line("masquerade "+who+" traffic for "+r.name+" external destinations", "-j "+chainMarkMasq))
		text = "route " + who + " traffic for " + r.name + " external destinations"
	default:
		text = who + " traffic for " + r.name + " external destinations"
	}
	return append(rules, line(text, target))
}

// firewallChain writes FW for a filtered frontend and gives its name. Frontends with the same list share one.
func (r *renderer) firewallChain(f *forward.Frontend, ext string) string {
	name := prefixFirewall + r.hash
	for _, o := range r.port.Frontends {
		if o.Filtered && !slices.Equal(o.Allow, f.Allow) {
			name = prefixFirewall + hash(r.port.Name.Service(), r.proto, " ", f.Addr.String())
			break
		}
	}
	text := ruleset.Comment(r.name + " loadbalancer IP")
	rules := make([]string, 0, len(f.Allow)+1)
	for _, p := range f.Allow {
		source := "-s " + p.String() + " "
		if p.Bits() == 0 {
			source = ""
		}
		rules = append(rules, source+text+"-j "+ext)
	}
	rules = append(rules, strings.TrimSuffix(
		ruleset.Comment("other traffic to "+r.name+" will be dropped by "+chainFirewall), " "))
	r.out.chains[ruleset.In(tableNAT, name)] = ruleset.BodyOf(rules...)
	return name
}

// pool writes the chain that chooses an endpoint, and the chains of the endpoints where they have their own.
func (r *renderer) pool(pool forward.Pool) {
	chain := poolChain(r.port.Name, pool)
	endpoints := r.port.Endpoints(pool)
	members := make([]member, len(endpoints))
	var sticky []string
	for i, ep := range endpoints {
		addr := ep.AddrPort.String()
		if r.compact && r.port.Affinity == 0 {
			members[i] = member{endpoint: ep.AddrPort, before: "-p " + r.proto + " ", after: "-j DNAT --to-destination " + addr}
			continue
		}
		sep := endpointChain(r.port.Name, ep.AddrPort)
		label := ""
		if !r.compact {
			label = ruleset.Comment(r.name + " -> " + addr)
		}
		members[i] = member{endpoint: ep.AddrPort, before: label, after: "-j " + sep}
		r.endpoint(sep, ep)
		if r.port.Affinity > 0 {
			seconds := strconv.Itoa(int(math.Ceil(r.port.Affinity.Seconds())))
			sticky = append(sticky, label+"-m recent --rcheck --seconds "+seconds+" --reap "+r.recent(sep)+"-j "+sep)
		}
	}
	rules := append(sticky, choose(chain, members, nil, func(name string, b ruleset.Body) { r.add(name, string(b)) })...)
	r.add(chain, rules...)
}

// recent gives the rest of a recent match: the list of one endpoint's clients.
func (r *renderer) recent(sep string) string {
	mask := "255.255.255.255"
	if r.opt.Family == model.IPv6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return "--name " + sep + " --mask " + mask + " --rsource "
}

// endpoint writes the chain of one endpoint.
func (r *renderer) endpoint(sep string, ep forward.Endpoint) {
	label, module := "", ""
	var rules []string
	if !r.compact {
		label, module = ruleset.Comment(r.name), "-m "+r.proto+" "
		rules = append(rules, "-s "+ruleset.Host(ep.Addr())+" "+label+"-j "+chainMarkMasq)
	}
	recent := ""
	if r.port.Affinity > 0 {
		recent = "-m recent --set " + r.recent(sep)
	}
	rules = append(rules, "-p "+r.proto+" "+label+recent+module+"-j DNAT --to-destination "+ep.AddrPort.String())
	r.out.chains[ruleset.In(tableNAT, sep)] = ruleset.BodyOf(rules...)
}
