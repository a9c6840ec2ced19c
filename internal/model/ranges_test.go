package model_test

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/turnout-proxy/turnout/internal/model"
)

func TestARangeThatTwoObjectsNameStaysUntilBothAreGone(t *testing.T) {
	s := model.NewSnapshot()
	var dirty model.Dirty
	put := func(name string, gone bool, ranges ...string) {
		c := &model.ServiceCIDR{Name: name}
		for _, r := range ranges {
			c.CIDRs = append(c.CIDRs, netip.MustParsePrefix(r))
		}
		s.Apply(model.Event{ServiceCIDR: c, Delete: gone}, &dirty)
	}
	check := func(what string, family model.Family, want ...string) {
		t.Helper()
		var got []string
		for _, p := range s.ServiceRanges(family) {
			got = append(got, p.String())
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s, %s ranges (-want +got):\n%s", what, family, diff)
		}
	}
	put("kubernetes", false, "10.96.0.0/12", "fd70::/112")
	put("more", false, "10.70.0.0/16", "10.96.0.0/12")
	check("two objects", model.IPv4, "10.70.0.0/16", "10.96.0.0/12")
	check("two objects", model.IPv6, "fd70::/112")
	put("kubernetes", true)
	check("one is gone", model.IPv4, "10.70.0.0/16", "10.96.0.0/12")
	check("one is gone", model.IPv6)
	put("more", false, "10.70.0.0/16")
	check("the other has changed", model.IPv4, "10.70.0.0/16")
	if !dirty.Empty() {
		t.Errorf("ranges marked Services or the Node: %v", dirty)
	}
}
