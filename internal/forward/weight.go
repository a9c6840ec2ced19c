package forward

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/turnout-proxy/turnout/internal/model"
)

// The annotations of a Service that say how its endpoints are chosen, where the mode can choose.
const (
	annotationScheduler = "turnout.dev/ipvs-scheduler"
	annotationNearness  = "turnout.dev/topology-weights"
)

// longestScheduler bounds what is kept of the annotation.
const longestScheduler = 64

// nearness is how much more new connections endpoints get that are on this node, or in its zone. 0 counts as 1.
type nearness struct {
	node, zone uint16
	// here is this node's zone.
	here string
}

// parseNearness reads "node=4,zone=2"; either may be missing.
func parseNearness(text, here string) (nearness, error) {
	n := nearness{here: here}
	for part := range strings.SplitSeq(text, ",") {
		key, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		weight, err := strconv.ParseUint(value, 10, 16)
		if err != nil || weight == 0 {
			return nearness{}, fmt.Errorf("%.40q is not node=N or zone=N with a number from 1 to 65535", part)
		}
		switch key {
		case "node":
			n.node = uint16(weight)
		case "zone":
			n.zone = uint16(weight)
		default:
			return nearness{}, fmt.Errorf("%.40q is not node=N or zone=N", part)
		}
	}
	return n, nil
}

// of gives the weight of an endpoint: its slice's, or what follows from where it is; 0 if nothing says so.
func (n nearness) of(part *model.EndpointSlice, ep *model.Endpoint, nodeName string) uint16 {
	switch {
	case part.Weight != 0:
		return part.Weight
	case n.node == 0 && n.zone == 0:
		return 0
	case n.node != 0 && nodeName != "" && ep.Node == nodeName:
		return n.node
	case n.zone != 0 && n.here != "" && ep.Zone == n.here:
		return n.zone
	}
	return 1
}

// choosing reads what a Service says about the choice of its endpoints. What cannot be read is ignored, with a finding.
func choosing(svc *model.Service, zone string) (scheduler string, n nearness, found []model.Finding) {
	if len(svc.Annotations) == 0 {
		return "", n, nil
	}
	scheduler = strings.TrimSpace(svc.Annotations[annotationScheduler])
	if len(scheduler) > longestScheduler {
		found = append(found, serviceFinding(svc, model.Warning, "InvalidAnnotation", fmt.Sprintf(
			"annotation %s has %d characters and is ignored: give a scheduler's name", annotationScheduler, len(scheduler))))
		scheduler = ""
	}
	text, has := svc.Annotations[annotationNearness]
	if !has {
		return scheduler, n, found
	}
	n, err := parseNearness(text, zone)
	if err != nil {
		found = append(found, serviceFinding(svc, model.Warning, "InvalidAnnotation", fmt.Sprintf(
			"annotation %s is ignored: %v", annotationNearness, err)))
	}
	return scheduler, n, found
}
