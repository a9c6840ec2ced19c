// Package cluster gives tests a real API server: an etcd and a kube-apiserver of their own, on loopback, with nothing
// in them but what a test creates. It decides which release that is, how its programs are had (see binary.go), and who
// may do what: one user may do everything, another has exactly the rights that a cluster gives its Service proxy.
//
// Only tests import it. It must not import package kube or any other source, which are tested against it.
package cluster

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// requireEnv, set to 1, makes a test fail where it would be skipped for want of a program.
const requireEnv = "TURNOUT_REQUIRE_CLUSTER"

// How long a program may take to start and to end.
const (
	readyWithin = 2 * time.Minute
	stopWithin  = 20 * time.Second
	askEvery    = 100 * time.Millisecond
	askTimeout  = 10 * time.Second
)

// The two users, by the tokens that name them.
const (
	adminToken = "admin-token"
	proxyToken = "proxy-token"
)

// tokens is the API server's list of users: token, name, uid, groups. A cluster binds the role of its Service proxies
// to the user system:kube-proxy from the start.
const tokens = adminToken + ",admin,1,\"system:masters\"\n" + proxyToken + ",system:kube-proxy,2\n"

// A Cluster is a running API server.
type Cluster struct {
	// Admin reaches the server as a user who may do everything, Proxy as one who may do what a Service proxy may.
	Admin, Proxy *rest.Config
	// Kubeconfig is the path of a file that reaches the server as Proxy does.
	Kubeconfig string

	tb        testing.TB
	dir       string
	apiserver string // the program
	port      int
	etcdURL   string
	certs     *certificates
	etcd, api *process
	inside    []string // a command that starts another in some environment, such as a network namespace
}

// An Option changes how a cluster is started.
type Option func(*Cluster)

// Inside makes the programs start through a command that enters another network and becomes them, such as "nsenter
// --net=PATH". Their addresses are then those of loopback over there, and the configurations of the cluster work over
// there only. It needs root.
func Inside(command ...string) Option {
	return func(c *Cluster) { c.inside = command }
}

// Start gives a cluster that lives until the test ends. Where a program is missing and cannot be built, the test is
// skipped with a message that says how to get it, or fails if TURNOUT_REQUIRE_CLUSTER is 1.
func Start(tb testing.TB, options ...Option) *Cluster {
	tb.Helper()
	c := &Cluster{tb: tb}
	etcd, err := exec.LookPath("etcd")
	if err != nil {
		missing(tb, errors.New("etcd is not in PATH: install it (Debian: apt-get install etcd-server)"))
	}
	ctx, cancel := buildTime(tb)
	defer cancel()
	if c.apiserver, err = Binary(ctx, APIServer, io.Discard); err != nil {
		missing(tb, fmt.Errorf("kube-apiserver: %w: build it with \"go run ./test/cluster/cmd/apiserver-build\", "+
			"or set %s to a directory that holds it", err, binaryEnv))
	}
	for _, o := range options {
		o(c)
	}
	c.dir = tb.TempDir()
	tb.Cleanup(c.stop)
	if err := c.start(etcd); err != nil {
		tb.Fatalf("start a cluster: %v", err)
	}
	return c
}

// missing ends a test that lacks a program.
func missing(tb testing.TB, err error) {
	tb.Helper()
	if os.Getenv(requireEnv) == "1" {
		tb.Fatal(err)
	}
	tb.Skip(err)
}

// buildTime bounds a build by the time that the test has, less what it needs afterwards.
func buildTime(tb testing.TB) (context.Context, context.CancelFunc) {
	tb.Helper()
	if d, ok := tb.(interface{ Deadline() (time.Time, bool) }); ok {
		if at, ok := d.Deadline(); ok {
			return context.WithDeadline(tb.Context(), at.Add(-readyWithin))
		}
	}
	return context.WithCancel(tb.Context())
}

// start writes what the programs need and starts them. Ports are free when they are chosen and may be taken when they
// are used, so it tries again with others.
func (c *Cluster) start(etcd string) error {
	if err := c.prepare(); err != nil {
		return err
	}
	const attempts = 3
	var err error
	for range attempts {
		if err = c.startBoth(etcd); err == nil {
			return c.configure()
		}
		c.stop()
	}
	return err
}

func (c *Cluster) startBoth(etcd string) error {
	ports, err := freePorts(3)
	if err != nil {
		return err
	}
	c.port = ports[0]
	c.etcdURL = fmt.Sprintf("http://127.0.0.1:%d", ports[1])
	peer := fmt.Sprintf("http://127.0.0.1:%d", ports[2])
	data := filepath.Join(c.dir, "etcd")
	if err := os.RemoveAll(data); err != nil {
		return fmt.Errorf("forget an earlier attempt: %w", err)
	}
	c.etcd, err = c.run("etcd", etcd, "--data-dir="+data, "--unsafe-no-fsync", "--quota-backend-bytes=8000000000",
		"--listen-client-urls="+c.etcdURL, "--advertise-client-urls="+c.etcdURL, "--listen-peer-urls="+peer,
		"--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer)
	if err != nil {
		return err
	}
	return c.StartServer()
}

// StartServer starts the API server again after StopServer, at the same address and with the same objects, and waits
// until it is ready.
func (c *Cluster) StartServer() error {
	var err error
	c.api, err = c.run("kube-apiserver", c.apiserver,
		"--etcd-servers="+c.etcdURL, fmt.Sprintf("--secure-port=%d", c.port), "--bind-address=127.0.0.1",
		// It refuses a loopback address here, and does not use this one: nothing reconciles its own endpoints.
		"--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none",
		"--tls-cert-file="+c.certs.serverCert, "--tls-private-key-file="+c.certs.serverKey,
		"--token-auth-file="+filepath.Join(c.dir, "tokens"), "--authorization-mode=RBAC",
		"--service-account-issuer=https://turnout.test", "--service-account-key-file="+c.certs.serverKey,
		"--service-account-signing-key-file="+c.certs.serverKey,
		"--service-cluster-ip-range=10.96.0.0/12,fd00:96::/112", "--enable-priority-and-fairness=false",
		"--disable-admission-plugins=ServiceAccount")
	if err != nil {
		return err
	}
	return c.waitReady()
}

// StopServer ends the API server at once, as a crash would.
func (c *Cluster) StopServer() {
	c.api.kill()
	c.api = nil
}

// Erase removes objects from the store behind a stopped API server, so that they are gone without anybody having seen
// them go. The prefix is that of the store's keys: "/registry/services/specs/default/web".
func (c *Cluster) Erase(ctx context.Context, prefix string) error {
	end := []byte(prefix)
	end[len(end)-1]++ // the first key after all that have the prefix
	body, err := json.Marshal(map[string][]byte{"key": []byte(prefix), "range_end": end})
	if err != nil {
		return fmt.Errorf("erase %s: %w", prefix, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.etcdURL+"/v3/kv/deleterange", bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("erase %s: %w", prefix, err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("erase %s: %w", prefix, err)
	}
	defer resp.Body.Close()
	var answer struct{ Deleted string }
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return fmt.Errorf("erase %s: %w", prefix, err)
	}
	if answer.Deleted == "" || answer.Deleted == "0" {
		return fmt.Errorf("erase %s: there is nothing", prefix)
	}
	return nil
}

// stop ends whatever runs, and shows the programs' last words if the test failed.
func (c *Cluster) stop() {
	for _, p := range []*process{c.api, c.etcd} {
		if p == nil {
			continue
		}
		p.kill()
		if c.tb.Failed() {
			c.tb.Logf("%s said at the end:\n%s", p.name, p.tail())
		}
	}
	c.api, c.etcd = nil, nil
}

// prepare writes keys, certificates and the list of users.
func (c *Cluster) prepare() error {
	var err error
	if c.certs, err = newCertificates(c.dir); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(c.dir, "tokens"), []byte(tokens), 0o600); err != nil {
		return fmt.Errorf("write the list of users: %w", err)
	}
	return nil
}

// configure fills in the configurations of both users.
func (c *Cluster) configure() error {
	as := func(token string) *rest.Config {
		return &rest.Config{
			Host: c.host(), BearerToken: token, TLSClientConfig: rest.TLSClientConfig{CAData: c.certs.ca},
			QPS: -1, // tests wait for nobody
		}
	}
	c.Admin, c.Proxy = as(adminToken), as(proxyToken)
	c.Kubeconfig = filepath.Join(c.dir, "kubeconfig")
	file := clientcmdapi.NewConfig()
	file.Clusters["test"] = &clientcmdapi.Cluster{Server: c.host(), CertificateAuthorityData: c.certs.ca}
	file.AuthInfos["proxy"] = &clientcmdapi.AuthInfo{Token: proxyToken}
	file.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "proxy"}
	file.CurrentContext = "test"
	if err := clientcmd.WriteToFile(*file, c.Kubeconfig); err != nil {
		return fmt.Errorf("write the kubeconfig: %w", err)
	}
	return nil
}

// Client gives a client that may do everything.
func (c *Cluster) Client() kubernetes.Interface {
	c.tb.Helper()
	client, err := kubernetes.NewForConfig(c.Admin)
	if err != nil {
		c.tb.Fatalf("client for the cluster: %v", err)
	}
	return client
}

func (c *Cluster) host() string { return fmt.Sprintf("https://127.0.0.1:%d", c.port) }

// waitReady asks the API server until it says that it is ready.
func (c *Cluster) waitReady() error {
	ctx, cancel := context.WithTimeout(context.Background(), readyWithin)
	defer cancel()
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		err := c.ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-c.api.done:
			return fmt.Errorf("kube-apiserver ended: %s", c.api.tail())
		case <-c.etcd.done:
			return fmt.Errorf("etcd ended: %s", c.etcd.tail())
		case <-ctx.Done():
			return fmt.Errorf("kube-apiserver is not ready after %v: %w", readyWithin, err)
		}
	}
}

// ask asks for readiness once.
func (c *Cluster) ask(ctx context.Context) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(c.certs.ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, DialContext: c.dial}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: askTimeout}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.host()+"/readyz", nil)
	if err != nil {
		return fmt.Errorf("ask for readiness: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask for readiness: %w", err)
	}
	defer resp.Body.Close()
	const enough = 4096 // bytes
	body, err := io.ReadAll(io.LimitReader(resp.Body, enough))
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("ask for readiness: %s: %s", resp.Status, body)
	}
	return nil
}

// dial opens a connection from where the API server runs.
func (c *Cluster) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	if len(c.inside) == 0 {
		return d.DialContext(ctx, network, addr) //nolint:wrapcheck // ask does
	}
	type result struct {
		conn net.Conn
		err  error
	}
	got := make(chan result, 1)
	go func() {
		// The thread is in another network from here on, and ends with this goroutine.
		runtime.LockOSThread()
		ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", c.api.cmd.Process.Pid))
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			_ = ns.Close()
		}
		if err != nil {
			got <- result{err: fmt.Errorf("enter the network of kube-apiserver: %w", err)}
			return
		}
		conn, err := d.DialContext(ctx, network, addr)
		got <- result{conn, err}
	}()
	r := <-got
	return r.conn, r.err
}

// A process is a program that runs beside the test.
type process struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// run starts a program with its output in a file.
func (c *Cluster) run(name, program string, args ...string) (*process, error) {
	p := &process{name: name, log: filepath.Join(c.dir, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("keep what %s says: %w", name, err)
	}
	defer out.Close()
	argv := append(slices.Clip(c.inside), append([]string{program}, args...)...)
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	// It must not outlive a test that is killed.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// The kernel sends the death signal when the thread that started the process ends, so this one must stay.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		// How it ended is in its log.
		_ = p.cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// kill ends the process and waits for that.
func (p *process) kill() {
	_ = p.cmd.Process.Kill() // an error says that it has ended already
	select {
	case <-p.done:
	case <-time.After(stopWithin):
	}
}

// tail gives the end of what the process said.
func (p *process) tail() string {
	const lines = 25
	data, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(string(bytes.TrimSpace(data)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// freePorts gives ports that nobody listens on.
func freePorts(n int) ([]int, error) {
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer l.Close() // all stay open until all are chosen, or one could be given twice
		addr, ok := l.Addr().(*net.TCPAddr)
		if !ok {
			return nil, fmt.Errorf("address %v is not one of TCP", l.Addr())
		}
		ports = append(ports, addr.Port)
	}
	return ports, nil
}
