// Command guest measures Service proxies in mode ipvs, one after the other, on the machine that it runs on, which is a
// virtual one: package race starts it there. It decides what is measured and how; what is run comes by the flags.
//
// For each proxy: the time until every endpoint is in the kernel, and until the first sync has ended by the proxy's own
// metric; the time from the answer of the API server to a changed EndpointSlice until the new endpoint is in the kernel;
// processor time, that of child processes included, at rest and for each change; memory. Between two proxies everything is
// removed.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

// A figure is what was measured of one proxy.
type figure struct {
	Name string `json:"name"`
	// Endpoints is the time from the start until all endpoints are in the kernel, FirstSync until the first sync has ended:
	// rules and sets may come after the endpoints.
	Endpoints float64 `json:"endpointsSeconds"`
	FirstSync float64 `json:"firstSyncSeconds"`
	// Effect are the times of changes, in milliseconds, sorted.
	EffectP50, EffectP90, EffectMax float64
	// CPUPerChange is in milliseconds, less what the same time costs at rest; Rest is for one second.
	CPUPerChange, CPUGross, CPUAtRest float64
	// StartCPU is the processor time until the first sync, in seconds.
	StartCPU float64
	// PeakMemory is in MB.
	PeakMemory float64
}

type settings struct {
	server, token     string
	services, perPool int
	changes           int
	// turn counts the proxies: an address that an earlier one was given would be no change.
	turn   byte
	client http.Client
}

func main() {
	var s settings
	flag.StringVar(&s.server, "server", "", "URL of the API server")
	flag.StringVar(&s.token, "token", "", "bearer token")
	flag.IntVar(&s.services, "services", 1000, "number of Services, named svc-0 and so on")
	flag.IntVar(&s.perPool, "endpoints", 10, "endpoints of each")
	flag.IntVar(&s.changes, "changes", 30, "how many changes are measured")
	flag.Parse()
	// The server's certificate is for other names than the one that it has from here.
	s.client = http.Client{Timeout: time.Minute, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above; it is a lab
	}}
	for i, command := range flag.Args() {
		s.turn = byte(i)
		f, err := measure(context.Background(), s, command)
		if err != nil {
			fmt.Fprintln(os.Stderr, "race:", err)
			os.Exit(1)
		}
		text, err := json.Marshal(f)
		if err != nil {
			panic(err)
		}
		_, _ = fmt.Fprintf(os.Stdout, "FIGURE %s\n", text)
	}
}

// measure runs one proxy, given as "NAME;CLEANUP...;START..." with words separated by blanks.
func measure(ctx context.Context, s settings, command string) (figure, error) {
	parts := strings.SplitN(command, ";", 3)
	f := figure{Name: parts[0]}
	table, err := ipvs.Open(ctx)
	if err != nil {
		return f, err
	}
	defer func() {
		cleanup := strings.Fields(parts[1])
		if out, err := exec.Command(cleanup[0], cleanup[1:]...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "race: clean up after %s: %v: %s\n", f.Name, err, out)
		}
	}()
	start := strings.Fields(parts[2])
	log, err := os.CreateTemp("", "race-"+f.Name)
	if err != nil {
		return f, fmt.Errorf("make a log: %w", err)
	}
	cmd := exec.Command(start[0], start[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return f, fmt.Errorf("start %s: %w", f.Name, err)
	}
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	}()
	if err := s.untilSynced(f.Name, began, log.Name()); err != nil {
		return f, err
	}
	f.Endpoints = time.Since(began).Seconds()
	for !s.reportsSync() {
		if time.Since(began) > limit {
			return f, fmt.Errorf("%s: no first sync within %v; its last words: %s", f.Name, limit, lastWords(log.Name()))
		}
		time.Sleep(100 * time.Millisecond)
	}
	f.FirstSync = time.Since(began).Seconds()
	f.StartCPU = cpu(cmd.Process.Pid).Seconds()
	fmt.Fprintf(os.Stderr, "race: %s: endpoints after %.2f s, first sync after %.2f s\n", f.Name, f.Endpoints,
		f.FirstSync)
	time.Sleep(5 * time.Second) // what follows a first sync
	const rest = 40 * time.Second
	before := cpu(cmd.Process.Pid)
	time.Sleep(rest)
	f.CPUAtRest = (cpu(cmd.Process.Pid) - before).Seconds() * 1000 / rest.Seconds()
	effects, took, spent, err := s.change(ctx, table, cmd.Process.Pid)
	if err != nil {
		return f, fmt.Errorf("%s: %w; its last words: %s", f.Name, err, lastWords(log.Name()))
	}
	f.EffectP50, f.EffectP90, f.EffectMax = effects[len(effects)/2], effects[len(effects)*9/10], effects[len(effects)-1]
	f.CPUGross = spent.Seconds() * 1000 / float64(s.changes)
	f.CPUPerChange = (spent.Seconds()*1000 - f.CPUAtRest*took.Seconds()) / float64(s.changes)
	f.PeakMemory = peak(cmd.Process.Pid)
	return f, nil
}

// limit is how long a first sync may take.
const limit = 20 * time.Minute

// reportsSync tells whether the proxy's metrics say that a sync of IPv4 has taken effect.
func (s settings) reportsSync() bool {
	resp, err := s.client.Get("http://127.0.0.1:10249/metrics")
	if err != nil {
		return false
	}
	defer func() { _ = resp.Body.Close() }()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		value, is := strings.CutPrefix(lines.Text(), `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} `)
		if is {
			return value != "0"
		}
	}
	return false
}

// untilSynced waits until the kernel has all endpoints, by counting lines, which is cheap.
func (s settings) untilSynced(name string, began time.Time, log string) error {
	for time.Since(began) < limit {
		file, err := os.Open("/proc/net/ip_vs")
		if err != nil {
			return fmt.Errorf("list virtual servers: %w", err)
		}
		n := 0
		for lines := bufio.NewScanner(file); lines.Scan(); {
			if strings.Contains(lines.Text(), "->") {
				n++
			}
		}
		_ = file.Close()
		if n >= s.services*s.perPool { // the heading counts, and the Service of the API server may
			return nil
		}
		time.Sleep(200 * time.Millisecond)
	}
	return fmt.Errorf("%s: no first sync within %v; its last words: %s", name, limit, lastWords(log))
}

// lastWords gives the end of a log.
func lastWords(log string) string {
	const most = 3000
	text, _ := os.ReadFile(log)
	return string(text[max(0, len(text)-most):])
}

// change gives endpoints of Services other addresses, one after the other.
func (s settings) change(
	ctx context.Context, table *ipvs.Kernel, pid int,
) (effects []float64, took, spent time.Duration, err error) {
	began, before := time.Now(), cpu(pid)
	for i := range s.changes {
		service := i * (s.services / s.changes)
		addr := netip.AddrFrom4([4]byte{10, 250, s.turn, byte(i + 1)})
		if err := s.patch(service, addr); err != nil {
			return nil, 0, 0, err
		}
		asked := time.Now()
		k := ipvs.Key{Family: model.IPv4, Proto: model.TCP, Addr: netip.AddrPortFrom(clusterIP(service), 80)}
		for {
			list, err := table.Destinations(ctx, k)
			if err != nil {
				return nil, 0, 0, err
			}
			if slices.ContainsFunc(list, func(d ipvs.Destination) bool { return d.Addr.Addr() == addr }) {
				break
			}
			if time.Since(asked) > 5*time.Minute {
				return nil, 0, 0, errors.New("a change took no effect within 5 minutes")
			}
			time.Sleep(10 * time.Millisecond)
		}
		effects = append(effects, time.Since(asked).Seconds()*1000)
		fmt.Fprintf(os.Stderr, "race: change %d took effect after %.0f ms\n", i+1, effects[len(effects)-1])
		time.Sleep(time.Second)
	}
	slices.Sort(effects)
	return effects, time.Since(began), cpu(pid) - before, nil
}

func clusterIP(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}) }

// patch replaces the first endpoint of a Service.
func (s settings) patch(service int, addr netip.Addr) error {
	body := fmt.Sprintf(`[{"op":"replace","path":"/endpoints/0/addresses/0","value":%q}]`, addr)
	url := fmt.Sprintf("%s/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/svc-%d", s.server, service)
	r, err := http.NewRequest(http.MethodPatch, url, strings.NewReader(body))
	if err != nil {
		return fmt.Errorf("ask for a change: %w", err)
	}
	r.Header.Set("Content-Type", "application/json-patch+json")
	r.Header.Set("Authorization", "Bearer "+s.token)
	resp, err := s.client.Do(r)
	if err != nil {
		return fmt.Errorf("ask for a change: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, resp.Status, text)
	}
	return nil
}

// cpu gives the processor time of a process and of its children that have ended.
func cpu(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	f := strings.Fields(rest)
	ticks := 0
	for _, i := range []int{11, 12, 13, 14} { // utime, stime, cutime, cstime, counted from the state
		n, _ := strconv.Atoi(f[i])
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// peak gives the most memory that a process ever had, in MB.
func peak(pid int) float64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmHWM:" {
			n, _ := strconv.ParseFloat(f[1], 64)
			return n / 1024
		}
	}
	return 0
}
