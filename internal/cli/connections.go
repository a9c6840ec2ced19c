package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/kernel"
	"github.com/turnout-proxy/turnout/internal/kernel/ipvs"
	"github.com/turnout-proxy/turnout/internal/model"
)

// defaultConnections is how many connections are listed unless more are asked for.
const defaultConnections = 1000

// connections lists what the kernel's virtual servers have connected, and names the Services as far as the listing
// knows them.
func (a *app) connections(ctx context.Context, l *answer.Listing, limit int, restricted bool) (answer.Connections, error) {
	out := answer.Connections{Connections: []answer.Connection{}}
	if err := a.needRootAlways("read the kernel's connections"); err != nil {
		return out, err
	}
	table, err := ipvs.Open(ctx)
	if errors.Is(err, kernel.ErrUnsupported) {
		return out, fmt.Errorf("only mode ipvs has a list of connections of its own: %w", err)
	}
	if err != nil {
		return out, err
	}
	services := serviceIndex(l)
	err = table.Connections(ctx, func(c ipvs.Connection) bool {
		service := services.of(c)
		if restricted && service == "" {
			return true
		}
		if limit > 0 && len(out.Connections) == limit {
			out.More = true
			return false
		}
		out.Connections = append(out.Connections, connectionAnswer(c, service))
		return true
	})
	slices.SortFunc(out.Connections, func(x, y answer.Connection) int {
		return cmp.Or(cmp.Compare(x.Service, y.Service), cmp.Compare(x.Frontend, y.Frontend), cmp.Compare(x.Client, y.Client))
	})
	return out, err
}

// needRootAlways says early what would end in a puzzling refusal by the kernel.
func (a *app) needRootAlways(what string) error {
	if a.getuid() != 0 {
		return errors.New("only root can " + what + "; run as root")
	}
	return nil
}

func connectionAnswer(c ipvs.Connection, service string) answer.Connection {
	out := answer.Connection{
		Service: service, Proto: c.Proto.String(), State: c.State, ExpiresSeconds: int(c.Expires.Seconds()),
		Client: c.Client.String(), Frontend: c.Virtual.String(), Endpoint: c.Destination.String(), Remembered: c.Template,
	}
	if c.Mark != 0 {
		out.Proto, out.Frontend = "-", fmt.Sprintf("mark %#x", c.Mark)
	}
	return out
}

// services knows whose a virtual server is, by address and port, or by node port.
type services struct {
	frontends map[string]string
	nodePorts map[string]string
}

func serviceIndex(l *answer.Listing) services {
	s := services{map[string]string{}, map[string]string{}}
	for i := range l.Rows {
		r := &l.Rows[i]
		if port, is := strings.CutPrefix(r.Frontend, "*:"); is {
			s.nodePorts[r.Family+" "+r.Proto+" "+port] = r.Service
		} else {
			s.frontends[r.Proto+" "+r.Frontend] = r.Service
		}
	}
	return s
}

func (s services) of(c ipvs.Connection) string {
	proto := c.Proto.String()
	if service, has := s.frontends[proto+" "+c.Virtual.String()]; has {
		return service
	}
	return s.nodePorts[familyName(c.Virtual.Addr())+" "+proto+" "+strconv.Itoa(int(c.Virtual.Port()))]
}

func familyName(a netip.Addr) string { return model.FamilyOf(a).String() }

// renderConnections prints them for people, in the order of columns of "ipvsadm -Lnc".
func (a *app) renderConnections(c *answer.Connections) error {
	rows := [][]cell{cells([]string{"PROTO", "EXPIRES", "STATE", "CLIENT", "FRONTEND", "ENDPOINT", "SERVICE"})}
	for _, e := range c.Connections {
		state := e.State
		if e.Remembered {
			state += " (remembered)"
		}
		rows = append(rows, []cell{
			{text: e.Proto},
			{text: expiresText(e.ExpiresSeconds)},
			{text: state},
			{text: e.Client},
			{text: e.Frontend},
			{text: e.Endpoint},
			{text: orDash(e.Service)},
		})
	}
	if len(c.Connections) == 0 {
		return written(fmt.Fprintln(a.stdout, "No connections."))
	}
	if err := writeTable(a.stdout, rows, colour(a.stdout)); err != nil {
		return err
	}
	if c.More {
		return written(fmt.Fprintf(a.stdout, "\nThere are more than these %d; --limit 0 lists all.\n", len(c.Connections)))
	}
	return nil
}

// expiresText writes minutes and seconds, as ipvsadm does.
func expiresText(seconds int) string { return fmt.Sprintf("%02d:%02d", seconds/60, seconds%60) }

func (a *app) printConnections(c *answer.Connections, output string) error {
	switch output {
	case outputJSON:
		return printJSON(a.stdout, c)
	case outputYAML:
		return printYAML(a.stdout, c)
	}
	return a.renderConnections(c)
}
