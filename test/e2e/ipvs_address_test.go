package e2e

import (
	"slices"
	"strings"
	"syscall"
	"testing"
)

// upstreamDevice has the addresses of Services where kube-proxy puts them.
const upstreamDevice = "kube-ipvs0"

// The addresses of Services move between the device and routes, without a failure either way. B028.
func TestIPVSAddressesMoveBetweenDeviceAndRoutes(t *testing.T) {
	s, s1, s2, na := ipvsSite(t)
	routes := na.args
	onDevice := append(slices.Clone(routes), "--ipvs-addresses=device")
	na.args = onDevice
	na.start()
	na.pool(s1, s2)
	s.works(t)
	l := s.load(gently(naRoutes(s.lab)), "s1", "s2")
	for turn, args := range [][]string{routes, onDevice, routes} {
		na.end(syscall.SIGTERM)
		na.args = args
		na.start()
		na.pool(s1, s2)
		l.flow(5)
		s.works(t)
		local := na.tool("ip", "route", "show", "table", "local", "proto", "84")
		device := strings.Contains(na.tool("ip", "-o", "link"), upstreamDevice)
		if onDevice := turn == 1; device != onDevice || strings.Contains(local, webIP4) == onDevice {
			t.Errorf("turn %d: the device is there: %v; routes:\n%s", turn+1, device, local)
		}
	}
	l.stop()
}
