package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const kubeconfig = `apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://api.example:6443"}}]
users: [{name: u, user: {token: secret}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`

func TestAConnectionIsReadFromItsSources(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	dir := t.TempDir()
	good, broken := filepath.Join(dir, "good"), filepath.Join(dir, "broken")
	for path, content := range map[string]string{good: kubeconfig, broken: "clusters: [\n"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	type result struct {
		Host, Token, Accept, Content, Agent string
		QPS                                 float32
		Burst                               int
	}
	const both = "application/vnd.kubernetes.protobuf,application/json"
	tests := map[string]struct {
		in    Connection
		want  result
		error string
	}{
		"kubeconfig": {
			in: Connection{Kubeconfig: good, QPS: 7, Burst: 9, UserAgent: "turnout/1"},
			want: result{
				"https://api.example:6443", "secret", both, "application/vnd.kubernetes.protobuf", "turnout/1",
				7, 9,
			},
		},
		"the master overrides the kubeconfig's server": {
			in: Connection{
				Kubeconfig: good, Master: "https://other.example", ContentType: "application/json",
				AcceptContentTypes: "application/json",
			},
			want: result{
				Host: "https://other.example", Token: "secret", Accept: "application/json",
				Content: "application/json",
			},
		},
		"a master alone is enough": {
			in:   Connection{Master: "http://127.0.0.1:8080"},
			want: result{Host: "http://127.0.0.1:8080", Accept: both, Content: "application/vnd.kubernetes.protobuf"},
		},
		"nothing, outside a pod": {
			in:    Connection{},
			error: "no API server is known, and this is not a pod of a cluster: set clientConnection.kubeconfig",
		},
		"a kubeconfig that is not there": {in: Connection{Kubeconfig: filepath.Join(dir, "absent")}, error: "absent"},
		"a broken kubeconfig":            {in: Connection{Kubeconfig: broken}, error: `read kubeconfig "` + broken},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			cfg, err := RESTConfig(tc.in)
			if tc.error != "" {
				if err == nil || !strings.Contains(err.Error(), tc.error) {
					t.Errorf("error %v, want one with %q", err, tc.error)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			got := result{
				cfg.Host, cfg.BearerToken, cfg.AcceptContentTypes, cfg.ContentType, cfg.UserAgent, cfg.QPS,
				cfg.Burst,
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("configuration (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAPodUsesItsServiceAccount(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	// Outside a pod the token's file is missing, which shows that it was looked for.
	if _, err := os.Stat("/var/run/secrets/kubernetes.io/serviceaccount/token"); err == nil {
		t.Skip("this machine is a pod itself")
	}
	_, err := RESTConfig(Connection{})
	if err == nil || !strings.Contains(err.Error(), "read the pod's credentials for the API server") {
		t.Errorf("error %v, want one on the pod's credentials", err)
	}
}
