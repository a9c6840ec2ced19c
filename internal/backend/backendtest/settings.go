package backendtest

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/test/netns"
)

// settings are what an operator and the machine itself decide: the node is na of the lab, if nothing else is said.
type settings struct {
	cfg  forward.Config
	host forward.Host
}

// nodeAddrs are the addresses of the machine that the proxy runs on.
func nodeAddrs() []netip.Addr {
	return addrs("10.20.0.11", "127.0.0.1", "fd20::11", "::1")
}

func addrs(texts ...string) []netip.Addr {
	list := make([]netip.Addr, len(texts))
	for i, s := range texts {
		list[i] = netip.MustParseAddr(s)
	}
	return list
}

func newSettings(family model.Family) settings {
	return settings{
		cfg: forward.Config{
			Family: family, NodeName: "na", Detect: forward.DetectClusterCIDR, ClusterCIDRs: netns.ClusterCIDRs(),
			LocalhostNodePorts: true,
		},
		host: forward.Host{Addrs: nodeAddrs()},
	}
}

// set takes one KEY=VALUE of the command "set".
func (s *settings) set(arg string) error {
	key, value, ok := strings.Cut(arg, "=")
	if !ok {
		return fmt.Errorf("set %s: want KEY=VALUE", arg)
	}
	var err error
	switch key {
	case "only": // was looked at when the script was read
		if value != "IPv4" && value != "IPv6" {
			err = fmt.Errorf("%q is not IPv4 or IPv6", value)
		}
	case "node":
		s.cfg.NodeName = value
	case "detect":
		modes := []forward.DetectMode{
			forward.DetectClusterCIDR, forward.DetectNodeCIDR, forward.DetectBridgeInterface,
			forward.DetectInterfaceNamePrefix, "None",
		}
		if s.cfg.Detect = forward.DetectMode(value); !slices.Contains(modes, s.cfg.Detect) {
			err = fmt.Errorf("%q is not one of %v", value, modes)
		}
	case "cluster-cidr":
		s.cfg.ClusterCIDRs, err = parseList(value, netip.ParsePrefix)
	case "bridge":
		s.cfg.BridgeInterface = value
	case "interface-prefix":
		s.cfg.InterfaceNamePrefix = value
	case "nodeport-addresses":
		s.cfg.NodePortAddresses, err = parseList(value, func(v string) (string, error) { return v, nil })
	case "host":
		s.host.Addrs, err = parseList(value, netip.ParseAddr)
	case "masquerade-all":
		s.cfg.MasqueradeAll, err = parseSwitch(value)
	case "localhost-nodeports":
		s.cfg.LocalhostNodePorts, err = parseSwitch(value)
	case "external-ips":
		var on bool
		on, err = parseSwitch(value)
		s.cfg.IgnoreExternalIPs = !on
	default:
		err = fmt.Errorf("there is no such setting")
	}
	if err != nil {
		return fmt.Errorf("set %s: %w", arg, err)
	}
	return nil
}

func parseSwitch(value string) (bool, error) {
	switch value {
	case "on":
		return true, nil
	case "off":
		return false, nil
	}
	return false, fmt.Errorf("%q is not on or off", value)
}

// parseList reads words that commas separate; nothing is an empty list.
func parseList[T any](value string, parse func(string) (T, error)) ([]T, error) {
	if value == "" {
		return nil, nil
	}
	parts := strings.Split(value, ",")
	list := make([]T, len(parts))
	for i, p := range parts {
		v, err := parse(p)
		if err != nil {
			return nil, err
		}
		list[i] = v
	}
	return list, nil
}
