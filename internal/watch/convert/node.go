package convert

import (
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/turnout-proxy/turnout/internal/model"
)

// taintToBeDeleted is put on a Node by the cluster autoscaler before it removes the machine.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Node gives the part of a Node that forwarding depends on. It is nil if the object cannot be used at all; the findings
// then say why.
func Node(n *corev1.Node) (*model.Node, []model.Finding) {
	f := &findings{kind: "Node", object: n.Name}
	if !validName(n.Name) {
		f.add(model.Error, InvalidName, "metadata.name: %s is not a valid name, the object is ignored: correct it",
			quote(n.Name))
		return nil, f.result()
	}
	out := &model.Node{
		Name:     intern(n.Name),
		Zone:     intern(n.Labels[corev1.LabelTopologyZone]),
		PodCIDRs: f.podCIDRs(&n.Spec),
		Deleting: n.DeletionTimestamp != nil || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
			return t.Key == taintToBeDeleted
		}),
	}
	out.Addresses = f.nodeAddresses(n.Status.Addresses)
	return out, f.result()
}

// nodeAddresses gives the internal addresses before the external ones, each in the API's order.
func (f *findings) nodeAddresses(list []corev1.NodeAddress) []netip.Addr {
	var out []netip.Addr
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		for i, a := range list {
			if a.Type != kind {
				continue
			}
			if ip, ok := f.addr(fmt.Sprintf("status.addresses[%d].address", i), a.Address); ok && !slices.Contains(out, ip) {
				out = append(out, ip)
			}
		}
	}
	return out
}

// podCIDRs reads spec.podCIDRs or, where that is absent, the older spec.podCIDR.
func (f *findings) podCIDRs(spec *corev1.NodeSpec) []netip.Prefix {
	list, field := spec.PodCIDRs, "spec.podCIDRs"
	if len(list) == 0 && spec.PodCIDR != "" {
		list, field = []string{spec.PodCIDR}, "spec.podCIDR"
	}
	return f.prefixes(field, list)
}

// ServiceCIDR gives the ranges of a ServiceCIDR. It is nil if the object cannot be used at all; the findings then say
// why.
func ServiceCIDR(c *networkingv1.ServiceCIDR) (*model.ServiceCIDR, []model.Finding) {
	f := &findings{kind: "ServiceCIDR", object: c.Name}
	if !validName(c.Name) {
		f.add(model.Error, InvalidName, "metadata.name: %s is not a valid name, the object is ignored: correct it",
			quote(c.Name))
		return nil, f.result()
	}
	out := &model.ServiceCIDR{Name: c.Name, CIDRs: f.prefixes("spec.cidrs", c.Spec.CIDRs)}
	return out, f.result()
}

// prefixes reads a list of address ranges; what is none is left out.
func (f *findings) prefixes(field string, list []string) []netip.Prefix {
	var out []netip.Prefix
	for i, s := range list {
		p, ok := parsePrefix(s)
		if !ok {
			f.add(model.Error, InvalidCIDR, "%s[%d]: %s is not an address range, it is ignored: write it as address/bits",
				field, i, quote(s))
			continue
		}
		out = append(out, p)
	}
	return out
}
