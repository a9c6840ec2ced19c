package forward

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

// A Builder keeps a Table up to date with a snapshot. What an Update costs depends on what changed; the table is the
// same as Build gives for the same snapshot, whatever the way to it was.
//
// A builder belongs to one goroutine.
type Builder struct {
	cfg      Config
	table    *Table
	services map[model.Name]*service
	// contested lists, for the few frontends that several ports claim, all of them; the first is served.
	contested map[Key][]PortName
	// filtered are the Services whose source ranges depend on the addresses of this machine.
	filtered map[model.Name]struct{}
	findings map[model.Name][]model.Finding
	node     []model.Finding
	// hostAddrs are the last Host's addresses as they came.
	hostAddrs []netip.Addr
	started   bool
	book      routeBook
	selector  selector
	parts     []*model.EndpointSlice
}

// A service is what a builder remembers of one Service.
type service struct {
	created time.Time
	ports   []*Port
	// lost are the frontends that others serve.
	lost []claim
}

// A claim is the wish of a Service port to serve a frontend.
type claim struct {
	key  Key
	port PortName
}

// A draft is a Service as it would be if nobody else claimed its frontends.
type draft struct {
	created  time.Time
	ports    []*Port
	findings []model.Finding
	filtered bool
}

// NewBuilder gives a builder with an empty table. The table's context is complete after the first Update.
func NewBuilder(cfg Config) *Builder {
	ctx, _ := newContext(&cfg, nil, Host{})
	return &Builder{
		cfg:       cfg,
		table:     &Table{Context: ctx, ports: map[PortName]*Port{}, index: map[Key]PortName{}},
		services:  map[model.Name]*service{},
		contested: map[Key][]PortName{},
		filtered:  map[model.Name]struct{}{},
		findings:  map[model.Name][]model.Finding{},
		book:      routeBook{},
	}
}

// Build makes the table of a snapshot. The findings are sorted by object; nobody needs to be told of them twice.
func Build(cfg Config, s *model.Snapshot, host Host) (*Table, []model.Finding) {
	b := NewBuilder(cfg)
	b.Update(s, model.Dirty{Node: true}, host)
	all := b.Findings()
	var list []model.Finding
	for _, object := range slices.Sorted(maps.Keys(all)) {
		list = append(list, all[object]...)
	}
	return b.Table(), list
}

// Table gives the table. It is the same one after every Update, changed in place.
func (b *Builder) Table() *Table { return b.table }

// Findings gives what is wrong with objects, by "Kind object". The map is the caller's.
func (b *Builder) Findings() map[string][]model.Finding {
	all := map[string][]model.Finding{}
	put := func(list []model.Finding) {
		for _, f := range list {
			object := f.Kind + " " + f.Object
			all[object] = append(all[object], f)
		}
	}
	put(b.node)
	for _, list := range b.findings {
		// All findings about one object come from one Service, so their order does not depend on the map's.
		put(list)
	}
	return all
}

// Update brings the table up to date. Dirty must name every Service whose object or slices changed since the last call;
// the first call takes everything. Ports that are not in the Delta keep their value and its address.
func (b *Builder) Update(s *model.Snapshot, dirty model.Dirty, host Host) Delta {
	var d Delta
	work := dirty.Services
	if !b.started || dirty.Node || !slices.Equal(b.hostAddrs, host.Addrs) {
		d.Context, work = b.refresh(s, dirty.Services, host)
	}
	drafts := make(map[model.Name]*draft, len(work))
	touched := map[Key]PortName{}
	for name := range work {
		drafts[name] = b.draft(s, name)
		b.claim(name, drafts[name], touched)
	}
	for _, name := range b.affected(touched) {
		if _, ok := drafts[name]; !ok {
			drafts[name] = b.draft(s, name)
		}
	}
	for name, next := range drafts {
		d.Ports = b.settle(name, next, d.Ports)
	}
	slices.SortFunc(d.Ports, PortName.Compare)
	return d
}

// refresh takes over the Node and the host, and adds the Services that depend on what changed to the dirty ones.
func (b *Builder) refresh(s *model.Snapshot, dirty map[model.Name]struct{}, host Host) (bool, map[model.Name]struct{}) {
	old := b.table.Context
	next, found := newContext(&b.cfg, s.Node, host)
	first := !b.started
	b.table.Context, b.node, b.started = next, found, true
	b.hostAddrs = slices.Clone(host.Addrs)
	work := dirty
	switch {
	case first || old.Zone != next.Zone || old.Detector.Known() != next.Detector.Known():
		work = make(map[model.Name]struct{}, len(s.Services)+len(dirty))
		maps.Copy(work, dirty)
		for name := range s.Services {
			work[name] = struct{}{}
		}
	case !slices.Equal(old.HostAddrs, next.HostAddrs):
		work = maps.Clone(b.filtered)
		maps.Copy(work, dirty)
	}
	return first || !old.Equal(&next), work
}

// draft decides one Service by itself.
func (b *Builder) draft(s *model.Snapshot, name model.Name) *draft {
	svc := s.Services[name]
	if svc == nil {
		return &draft{}
	}
	ctx := &b.table.Context
	addrs, found := serviceAddresses(svc, ctx.Family)
	d := &draft{created: svc.Created, findings: found}
	if !addrs.cluster.IsValid() {
		return d
	}
	b.collect(s.Slices[name])
	defer func() { clear(b.parts) }()
	d.findings = append(d.findings, unusable(b.parts, ctx.Family)...)
	var f filter
	if len(addrs.vips) > 0 {
		f, found = sourceFilter(svc, ctx.Family, ctx.HostAddrs)
		d.findings = append(d.findings, found...)
		d.filtered = f.on
	}
	scheduler, near, found := choosing(svc, ctx.Zone)
	d.findings = append(d.findings, found...)
	b.selector.weights = near
	names := make([]PortName, 0, len(svc.Ports))
	for _, p := range svc.Ports {
		n := PortName{Name: name, Port: p.Name, Proto: p.Protocol}
		if slices.Contains(names, n) {
			d.findings = append(d.findings, serviceFinding(svc, model.Error, "DuplicatePort", fmt.Sprintf(
				"spec.ports has several entries with name %q and protocol %s; all but the first are ignored",
				p.Name, p.Protocol)))
			continue
		}
		names = append(names, n)
		port := b.port(svc, p, n, &addrs, &f)
		port.Scheduler = scheduler
		d.ports = append(d.ports, port)
	}
	slices.SortFunc(d.ports, func(x, y *Port) int { return x.Name.Compare(y.Name) })
	if svc.Type == model.LoadBalancer && svc.ExternalLocal && svc.HealthCheckNodePort != 0 && len(d.ports) > 0 {
		d.ports[0].HealthCheckNodePort = svc.HealthCheckNodePort
		d.ports[0].LocalReady = localReady(b.parts, ctx.Family, ctx.NodeName, names)
	}
	for _, p := range d.ports {
		if p.healthOnNodePort() {
			d.findings = append(d.findings, healthConflict(p, "its own node port"))
			p.HealthCheckNodePort, p.LocalReady = 0, 0
		}
	}
	return d
}

// collect puts a Service's slices in the order of their names.
func (b *Builder) collect(parts map[string]*model.EndpointSlice) {
	b.parts = b.parts[:0]
	for _, part := range parts {
		b.parts = append(b.parts, part)
	}
	slices.SortFunc(b.parts, func(x, y *model.EndpointSlice) int { return cmp.Compare(x.Name.Name, y.Name.Name) })
}

// port decides one port of a Service.
func (b *Builder) port(svc *model.Service, p model.ServicePort, name PortName, addrs *addresses, f *filter) *Port {
	ctx := &b.table.Context
	pol := policy{
		externalLocal: externalLocal(svc), internalLocal: svc.InternalLocal,
		masqueradeAll: b.cfg.MasqueradeAll, podsKnown: ctx.Detector.Known(),
	}
	outside := p.NodePort != 0 || len(addrs.vips) > 0 || len(addrs.externalIPs) > 0
	b.selector.gather(b.parts, name, ctx.Family, ctx.NodeName)
	sel := b.selector.pick(!pol.internalLocal || outside, pol.internalLocal || pol.externalLocal && outside,
		ctx.NodeName, ctx.Zone)
	b.selector.reset()
	in, out := b.book.routes(pol.internal(&sel)), b.book.routes(pol.external(&sel))
	return &Port{
		Name: name, Affinity: svc.Affinity, Cluster: sel.cluster, Local: sel.local, Serving: sel.serving,
		Frontends: frontends(addrs, p, !b.cfg.IgnoreExternalIPs, f, in, out),
	}
}

// claim replaces what a Service claims by what its draft claims. For each frontend whose claims change, touched gets
// the port that served it before the update.
func (b *Builder) claim(name model.Name, d *draft, touched map[Key]PortName) {
	was := b.services[name]
	if was != nil && was.created.Equal(d.created) && slices.Equal(was.claims(), d.claims()) {
		return
	}
	if was != nil {
		for _, c := range was.claims() {
			b.note(c.key, touched)
			b.release(c)
		}
	}
	if len(d.ports) == 0 {
		return
	}
	if was == nil {
		was = &service{}
		b.services[name] = was
	}
	was.created = d.created
	for _, c := range d.claims() {
		b.note(c.key, touched)
		b.acquire(c)
	}
}

func (b *Builder) note(k Key, touched map[Key]PortName) {
	if _, ok := touched[k]; !ok {
		touched[k] = b.table.index[k]
	}
}

// claims lists what a Service claims, ordered by port and place.
func (s *service) claims() []claim { return claimsOf(s.ports, s.lost) }

func (d *draft) claims() []claim { return claimsOf(d.ports, nil) }

func claimsOf(ports []*Port, lost []claim) []claim {
	n := len(lost)
	for _, p := range ports {
		n += len(p.Frontends)
	}
	list := make([]claim, 0, n)
	for _, p := range ports {
		for _, f := range p.Frontends {
			list = append(list, claim{f.Key(p.Name.Proto), p.Name})
		}
		if p.HealthCheckNodePort != 0 {
			list = append(list, claim{p.healthKey(), p.Name})
		}
	}
	return append(list, lost...)
}

// healthKey is what a health check node port claims: the TCP port of this machine, like a node port.
func (p *Port) healthKey() Key { return Key{Port: p.HealthCheckNodePort, Proto: model.TCP} }

// healthOnNodePort tells that a Service port asks for its health check on its own node port.
func (p *Port) healthOnNodePort() bool {
	return p.HealthCheckNodePort != 0 && slices.ContainsFunc(p.Frontends, func(f Frontend) bool {
		return f.Key(p.Name.Proto) == p.healthKey()
	})
}

// acquire files a claim. The port that serves the frontend is the first by precedes.
func (b *Builder) acquire(c claim) {
	holder, held := b.table.index[c.key]
	if !held {
		b.table.index[c.key] = c.port
		return
	}
	all := b.contested[c.key]
	if all == nil {
		all = []PortName{holder}
	}
	at, _ := slices.BinarySearchFunc(all, c.port, b.precedence)
	all = slices.Insert(all, at, c.port)
	b.contested[c.key] = all
	b.table.index[c.key] = all[0]
}

// release takes a claim back.
func (b *Builder) release(c claim) {
	all := b.contested[c.key]
	if all == nil {
		delete(b.table.index, c.key)
		return
	}
	all = slices.DeleteFunc(all, func(n PortName) bool { return n == c.port })
	b.table.index[c.key] = all[0]
	if len(all) == 1 {
		delete(b.contested, c.key)
		return
	}
	b.contested[c.key] = all
}

// precedence orders the ports that claim one frontend: the oldest Service first, then by name.
func (b *Builder) precedence(x, y PortName) int {
	return cmp.Or(b.services[x.Name].created.Compare(b.services[y.Name].created), x.Compare(y))
}

// affected lists the Services that have a claim to a touched frontend which now is served by another port than before.
func (b *Builder) affected(touched map[Key]PortName) []model.Name {
	var names []model.Name
	for key, before := range touched {
		now := b.table.index[key]
		if now == before {
			continue
		}
		if now != (PortName{}) {
			names = append(names, now.Name)
		}
		if before != (PortName{}) {
			names = append(names, before.Name)
		}
		for _, n := range b.contested[key] {
			names = append(names, n.Name)
		}
	}
	return names
}

// settle puts a Service's draft into the table, without the frontends that others serve, and adds the ports that
// changed to a list.
func (b *Builder) settle(name model.Name, d *draft, changed []PortName) []PortName {
	found := d.findings
	var lost []claim
	ports := make([]*Port, 0, len(d.ports))
	for _, p := range d.ports {
		kept := p.Frontends[:0]
		for _, f := range p.Frontends {
			key := f.Key(p.Name.Proto)
			winner := b.table.index[key]
			if winner == p.Name {
				kept = append(kept, f)
				continue
			}
			lost = append(lost, claim{key, p.Name})
			found = append(found, conflict(p.Name, &f, winner))
		}
		p.Frontends = kept
		if key := p.healthKey(); key.Port != 0 && b.table.index[key] != p.Name {
			lost = append(lost, claim{key, p.Name})
			found = append(found, healthConflict(p, b.table.index[key].String()))
			p.HealthCheckNodePort, p.LocalReady = 0, 0
		}
		if len(kept) == 0 && p.HealthCheckNodePort == 0 {
			continue
		}
		p.trim()
		if old := b.table.ports[p.Name]; p.Equal(old) {
			p = old
		} else {
			b.table.ports[p.Name] = p
			changed = append(changed, p.Name)
		}
		ports = append(ports, p)
	}
	changed = b.remember(name, d, ports, lost, changed)
	remember(b.findings, name, found, len(found) > 0)
	remember(b.filtered, name, struct{}{}, d.filtered)
	return changed
}

// remember stores what a Service has become, and takes the ports that it no longer has from the table.
func (b *Builder) remember(
	name model.Name, d *draft, ports []*Port, lost []claim, changed []PortName,
) []PortName {
	was := b.services[name]
	if was == nil {
		return changed
	}
	for _, p := range was.ports {
		if !slices.ContainsFunc(ports, func(n *Port) bool { return n.Name == p.Name }) {
			delete(b.table.ports, p.Name)
			changed = append(changed, p.Name)
		}
	}
	was.ports, was.lost = ports, lost
	if len(d.ports) == 0 {
		delete(b.services, name)
	}
	return changed
}

// remember keeps a map free of entries that say nothing.
func remember[V any](m map[model.Name]V, name model.Name, v V, keep bool) {
	if keep {
		m[name] = v
	} else {
		delete(m, name)
	}
}

// trim empties the pools that no route uses.
func (p *Port) trim() {
	if !p.Uses(ClusterPool) {
		p.Cluster = nil
	}
	if !p.Uses(LocalPool) {
		p.Local = nil
	}
}

// conflict reports a frontend that another port serves.
func conflict(loser PortName, f *Frontend, winner PortName) model.Finding {
	return model.Finding{
		Severity: model.Error, Kind: "Service", Object: loser.Name.String(), Reason: "FrontendConflict",
		Message: fmt.Sprintf(
			"%s %s of port %s is served for %s, which has the older claim; give one of them another address or port",
			f.Kind, f.address()+"/"+loser.Proto.String(), loser, winner),
	}
}

// healthConflict reports a health check that cannot be answered, as its port is taken.
func healthConflict(p *Port, holder string) model.Finding {
	return model.Finding{
		Severity: model.Error, Kind: "Service", Object: p.Name.Name.String(), Reason: "HealthPortConflict",
		Message: fmt.Sprintf("healthCheckNodePort %d is taken by %s; give the Service another healthCheckNodePort",
			p.HealthCheckNodePort, holder),
	}
}
