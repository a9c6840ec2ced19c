package forward

import (
	"net/netip"
	"testing"
	"time"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestAHealthCheckPortBelongsToTheOldestService(t *testing.T) {
	snapshot := model.NewSnapshot()
	var dirty model.Dirty
	for i, name := range []string{"young", "old"} {
		snapshot.Apply(model.Event{Service: &model.Service{
			Name: model.Name{Namespace: "shop", Name: name}, Created: time.Unix(int64(100-i), 0), Type: model.LoadBalancer,
			ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 70, 1, byte(i)})}, ExternalLocal: true, HealthCheckNodePort: 31990,
			Ports: []model.ServicePort{{Name: "web", Protocol: model.TCP, Port: 80}},
		}}, &dirty)
	}
	builder := NewBuilder(Config{Family: model.IPv4, NodeName: "na"})
	builder.Update(snapshot, dirty, Host{})
	port := func(name string) *Port {
		return builder.Table().Port(PortName{Name: model.Name{Namespace: "shop", Name: name}, Port: "web", Proto: model.TCP})
	}
	if got := port("old").HealthCheckNodePort; got != 31990 {
		t.Errorf("the older Service has health check port %d, want 31990", got)
	}
	if got := port("young").HealthCheckNodePort; got != 0 {
		t.Errorf("the younger Service has health check port %d, want none", got)
	}
	found := builder.Findings()["Service shop/young"]
	if len(found) != 1 || found[0].Reason != "HealthPortConflict" {
		t.Errorf("findings of the younger Service: %v, want one HealthPortConflict", found)
	}
	dirty = model.Dirty{}
	snapshot.Apply(model.Event{Service: &model.Service{Name: model.Name{Namespace: "shop", Name: "old"}}, Delete: true}, &dirty)
	delta := builder.Update(snapshot, dirty, Host{})
	if got := port("young").HealthCheckNodePort; got != 31990 || len(delta.Ports) != 2 {
		t.Errorf("after the older one is gone: port %d, want 31990; delta %v, want both ports", got, delta.Ports)
	}
}
