package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/kube-proxy/config/v1alpha1"
)

// A setting is one that would change behaviour and that this version does not act upon.
type setting struct {
	// field is its place in the file, flag its name on the command line ("" for none).
	field, flag string
	// set tells whether a file asks for something.
	set func(*v1alpha1.KubeProxyConfiguration) bool
}

func unusedSettings() []setting {
	type c = v1alpha1.KubeProxyConfiguration
	return []setting{
		{"conntrack.maxPerCore", "conntrack-max-per-core", func(c *c) bool { return c.Conntrack.MaxPerCore != nil }},
		{"conntrack.min", "conntrack-min", func(c *c) bool { return c.Conntrack.Min != nil }},
		{"conntrack.tcpEstablishedTimeout", "conntrack-tcp-timeout-established", func(c *c) bool {
			return c.Conntrack.TCPEstablishedTimeout != nil
		}},
		{"conntrack.tcpCloseWaitTimeout", "conntrack-tcp-timeout-close-wait", func(c *c) bool {
			return c.Conntrack.TCPCloseWaitTimeout != nil
		}},
		{"conntrack.tcpBeLiberal", "conntrack-tcp-be-liberal", func(c *c) bool { return c.Conntrack.TCPBeLiberal }},
		{"conntrack.udpTimeout", "conntrack-udp-timeout", func(c *c) bool { return c.Conntrack.UDPTimeout.Duration != 0 }},
		{"conntrack.udpStreamTimeout", "conntrack-udp-timeout-stream", func(c *c) bool {
			return c.Conntrack.UDPStreamTimeout.Duration != 0
		}},
		{"showHiddenMetricsForVersion", "show-hidden-metrics-for-version", func(c *c) bool {
			return c.ShowHiddenMetricsForVersion != ""
		}},
		{"logging.options.text.splitStream", "log-text-split-stream", func(c *c) bool {
			return c.Logging.Options.Text.SplitStream
		}},
		{"logging.options.json.splitStream", "", func(c *c) bool { return c.Logging.Options.JSON.SplitStream }},
	}
}

// unused gives one line for each setting that was asked for and is not acted upon. Changed tells which flags were
// given; without it the fields of the configuration are looked at, which then must not be defaulted yet. What belongs
// to another mode is not listed: it changes nothing in this one.
func unused(c *v1alpha1.KubeProxyConfiguration, changed func(flag string) bool) []string {
	var lines []string
	for _, s := range unusedSettings() {
		name := s.field
		asked := s.set(c)
		if changed != nil {
			name, asked = "--"+s.flag, s.flag != "" && changed(s.flag)
		}
		if asked {
			lines = append(lines, fmt.Sprintf("Setting %s is not acted upon by this version", name))
		}
	}
	var gates []string
	for _, g := range slices.Sorted(maps.Keys(c.FeatureGates)) {
		if g != "AllowServiceExternalIPs" {
			gates = append(gates, g)
		}
	}
	if len(gates) > 0 {
		lines = append(lines, "Feature gates are not acted upon by this version: "+strings.Join(gates, " "))
	}
	return lines
}
