package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"github.com/turnout-proxy/turnout/internal/config"
	"github.com/turnout-proxy/turnout/internal/control"
	"github.com/turnout-proxy/turnout/internal/control/answer"
	"github.com/turnout-proxy/turnout/internal/forward"
	"github.com/turnout-proxy/turnout/internal/kernel/link"
)

const traceLong = `Say what happens to the first packet of a connection on this node, and why: which Service it is for,
who may come, which endpoints it may go to, whose address they see, and the kernel objects that do it. No packet is sent.

SRC is ADDRESS or ADDRESS:PORT. DST:PORT is where the client dials; the protocol is tcp unless it is given. An IPv6
address with a port stands in brackets: [fd00::1]:443. Without --in the packet is taken as sent by this machine itself
if SRC is one of its addresses, and as coming from elsewhere if not.

With a daemon on the socket it is asked. Without one the rules in the kernel are followed. With --manifests neither is
asked: the answer is what a daemon would do with the objects of the directory.

Exit status: 0 forwarded, 1 failed, 2 wrong use, 3 rejected or dropped, 4 not a Service address.`

const traceExample = `  turnout trace 10.244.1.5 10.96.0.1:443
  turnout trace 10.244.1.5:40000 10.96.0.10:53/udp -o json
  turnout trace fd00:244::5 [fd00:96::1]:443
  turnout trace 203.0.113.7 192.0.2.10:30080 --in eth0
  turnout trace 10.244.1.5 10.96.0.1:443 --manifests ./services --node node-a --host-address 192.0.2.10`

func (a *app) traceCommand() *cobra.Command {
	o := config.NewOptions()
	output, in := outputText, ""
	var hosts []string
	cmd := &cobra.Command{
		Use: "trace SRC DST:PORT[/PROTO]", Short: "Say what happens to a packet, and why", Long: traceLong,
		Example: traceExample, Args: sourceAndDestination, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := answer.ParsePacket(args[0], args[1], in)
			if err != nil {
				return usagef("%s", err)
			}
			host, err := parseAddrs(hosts)
			if err != nil {
				return err
			}
			cfg, _, err := o.Complete()
			if err != nil {
				return err
			}
			tr, err := a.trace(cmd.Context(), cfg, p, host)
			if err != nil {
				return err
			}
			if err := a.printTrace(&tr, output); err != nil {
				return err
			}
			return verdictStatus(tr.Verdict)
		},
	}
	cmd.Flags().StringVar(&in, "in", "", "interface that the packet comes in on")
	cmd.Flags().StringSliceVar(&hosts, "host-address", nil, "address of the node's own, for --manifests; can be repeated; "+
		"default those of the Node object")
	o.AddOfflineFlags(cmd.Flags())
	addOutput(cmd, &output, outputText, outputJSON)
	return cmd
}

func sourceAndDestination(cmd *cobra.Command, args []string) error {
	if len(args) != 2 {
		return usagef("%s takes a source and a destination, got %q; for example: turnout trace 10.244.1.5 10.96.0.1:443",
			cmd.CommandPath(), args)
	}
	return nil
}

func parseAddrs(list []string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, text := range list {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, usagef("--host-address %q is not an IP address", text)
		}
		out = append(out, a.Unmap())
	}
	return out, nil
}

// verdictStatus gives the process's status for a verdict.
func verdictStatus(verdict string) error {
	switch verdict {
	case forward.Reject.String(), forward.Drop.String():
		return &statusError{status: statusRefused}
	case forward.Pass.String():
		return &statusError{status: statusPass}
	}
	return nil
}

// trace asks the best source there is.
func (a *app) trace(
	ctx context.Context, cfg *config.Config, p forward.Packet, host []netip.Addr,
) (answer.Trace, error) {
	if cfg.Manifests != "" {
		o, err := loadOffline(cfg, host)
		if err != nil {
			return answer.Trace{}, err
		}
		return o.trace(p)
	}
	tr, err := control.NewClient(cfg.Socket).Trace(ctx, p)
	if errors.Is(err, control.ErrNoDaemon) {
		if err := a.needRoot("read the kernel's rules"); err != nil {
			return tr, err
		}
		if len(host) == 0 {
			if host, err = link.Addrs(); err != nil {
				return tr, err
			}
		}
		return kernelTrace(ctx, cfg, p, host)
	}
	return tr, err
}

func (a *app) printTrace(tr *answer.Trace, output string) error {
	if output == outputJSON {
		return printJSON(a.stdout, tr)
	}
	return renderTrace(a.stdout, tr, colour(a.stdout))
}

// mostChoices is how many endpoints a person is shown.
const mostChoices = 10

// renderTrace prints a trace for people: one fact a line, then the endpoints, then the kernel objects.
func renderTrace(w io.Writer, tr *answer.Trace, p paint) error {
	rows := [][]cell{fact("packet", packetText(&tr.Packet))}
	add := func(name, text string) {
		if text != "" {
			rows = append(rows, fact(name, text))
		}
	}
	if tr.Service != "" {
		add("service", strings.Join(strings.Fields(fmt.Sprintf("%s, %s %s", tr.Service, tr.Kind, tr.Frontend)), " "))
	}
	add("client", clientText(tr.Client))
	if tr.Filtered {
		add("filter", "admits "+allowText(true, tr.Allow))
	}
	add("policy", tr.Policy)
	if tr.AffinitySeconds > 0 {
		add("affinity", "a client stays with its endpoint for "+affinityText(tr.AffinitySeconds))
	}
	rows = append(rows, []cell{{text: "verdict"}, verdictCell(tr)})
	add("why", tr.Explanation)
	for i, c := range tr.Choices {
		if i == mostChoices && len(tr.Choices) > mostChoices+1 {
			rows = append(rows, fact("", fmt.Sprintf("and %d more, which -o json lists", len(tr.Choices)-i)))
			break
		}
		rows = append(rows, []cell{{text: label("endpoints", i)}, {text: choiceText(c)}})
	}
	for i, s := range tr.Steps {
		what := cell{text: fmt.Sprintf("%-34s %s", s.Where, s.What), shade: faint}
		rows = append(rows, []cell{{text: label("rules", i)}, what})
	}
	if tr.Disagreement != "" {
		rows = append(rows, []cell{{text: "BUT"}, {text: tr.Disagreement, shade: red}})
	}
	if tr.Source == answer.FromKernel {
		add("source", "the rules in the kernel; no daemon answers, so what is wanted is not known")
	}
	return writeTable(w, rows, p)
}

func fact(name, text string) []cell { return []cell{{text: name}, {text: text}} }

// label names the first line of a list.
func label(name string, i int) string {
	if i > 0 {
		return ""
	}
	return name
}

func packetText(p *answer.Packet) string {
	text := fmt.Sprintf("%s -> %s/%s", p.Src, p.Dst, p.Proto)
	if p.In != "" {
		text += ", in on " + p.In
	}
	return text
}

func clientText(class string) string {
	switch class {
	case forward.Pod.String():
		return "a pod of this cluster"
	case forward.Node.String():
		return "this node itself"
	case forward.Any.String():
		return "any client"
	}
	return class
}

func verdictCell(tr *answer.Trace) cell {
	c := cell{text: tr.Verdict, shade: green}
	if tr.Reason != "" {
		c.text += " " + tr.Reason
	}
	switch tr.Verdict {
	case forward.Reject.String(), forward.Drop.String():
		c.shade = red
	case forward.Pass.String():
		c.shade = plain
	}
	return c
}

func choiceText(c answer.Choice) string {
	var notes []string
	if c.SNAT {
		notes = append(notes, "snat")
	}
	if c.Local {
		notes = append(notes, "on this node")
	}
	return strings.TrimRight(fmt.Sprintf("%-28s %6s  %s", c.Endpoint, percent(c.Share), strings.Join(notes, ", ")), " ")
}
