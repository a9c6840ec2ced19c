package ipvs_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/turnout-proxy/turnout/internal/backend/ipvs"
)

// B009, B010, B011, B026, B027.
func TestParametersFollowTheKernelAndTheSettings(t *testing.T) {
	const always = "conntrack=1 expire_nodest_conn=1 expire_quiescent_template=1 ip_forward=1"
	tests := map[string]struct {
		major, minor int
		strict       bool
		want, notice string
	}{
		"before there was a choice": {4, 0, false, always, "uses a port again"},
		"CentOS 7":                  {3, 10, false, always, "uses a port again"},
		"with either fault":         {4, 1, false, always + " conn_reuse_mode=0", "may be sent to an endpoint that is going"},
		"the last with a fault":     {5, 8, false, always + " conn_reuse_mode=0", "may be sent to an endpoint that is going"},
		"the first without":         {5, 9, false, always + " conn_reuse_mode=1", ""},
		"today, strict about ARP":   {6, 12, true, always + " conn_reuse_mode=1 arp_ignore=1 arp_announce=2", ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			list, notice := ipvs.Parameters(tc.major, tc.minor, tc.strict)
			var got []string
			for _, p := range list {
				got = append(got, fmt.Sprintf("%s=%s", p.Name[strings.LastIndexByte(p.Name, '/')+1:], p.Value))
				if p.Without == "" {
					t.Errorf("%s does not say what goes wrong without it", p.Name)
				}
			}
			if text := strings.Join(got, " "); text != tc.want {
				t.Errorf("got  %s\nwant %s", text, tc.want)
			}
			if !strings.Contains(notice, tc.notice) || tc.notice == "" && notice != "" {
				t.Errorf("notice %q, want one with %q", notice, tc.notice)
			}
		})
	}
}
