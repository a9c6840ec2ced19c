package event

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
)

// How a request is tried.
const (
	requestTimeout = 10 * time.Second
	tries          = 5
	firstRetry     = time.Second // doubled each time, and stretched by up to as much again
	lastRetry      = 30 * time.Second
)

// A trouble is a reason why Events do not get through.
type trouble int

const (
	forbidden   trouble = iota + 1 // the user lacks a permission
	refused                        // the server will never take it
	unreachable                    // the server does not answer, or has no time
	vanishing                      // the namespace is being deleted, which is nobody's fault
)

// deliver posts an Event, if need be with several tries.
func (p *Publisher) deliver(ctx context.Context, e entry) {
	p.post.identify(ctx, &e.event.Regarding)
	delay := firstRetry
	for try := 1; ; try++ {
		err := p.post.create(ctx, e.event)
		if err == nil {
			p.cfg.Count(Posted)
			return
		}
		if ctx.Err() != nil {
			return // the request ended with the daemon
		}
		why := classify(err)
		if why != unreachable || try == tries {
			p.fail(e, why, err)
			return
		}
		pause := wait.Jitter(delay, 1)
		if s, ok := apierrors.SuggestsClientDelay(err); ok {
			pause = max(pause, time.Duration(s)*time.Second)
		}
		if !p.wait(ctx, min(pause, lastRetry)) {
			return
		}
		delay *= 2
	}
}

// fail gives an Event up. It may be published again at once.
func (p *Publisher) fail(e entry, why trouble, err error) {
	p.cfg.Count(Failed)
	p.mu.Lock()
	p.seen.forget(e.key)
	p.mu.Unlock()
	now := p.clock.Now()
	last, told := p.reported[why]
	if why == vanishing || told && now.Sub(last) < repeatAfter {
		return
	}
	p.reported[why] = now
	err = fmt.Errorf("post an Event in namespace %q: %w", e.event.Namespace, err)
	if why == forbidden {
		err = fmt.Errorf("%w; allow the daemon's user to create events in the API group events.k8s.io, as the "+
			"ClusterRole system:node-proxier does", err)
	}
	p.cfg.Report(err)
}

// classify tells why a request failed.
func classify(err error) trouble {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return unreachable
	}
	code := int(status.Status().Code)
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return vanishing
	case code == http.StatusForbidden:
		return forbidden
	case code == http.StatusTooManyRequests, code >= http.StatusInternalServerError:
		return unreachable
	}
	return refused
}

// A poster speaks with the API server.
type poster struct {
	client rest.Interface
	// close ends connections that no request uses.
	close func()
}

// newPoster uses a scheme of its own, which has only Events: the ready-made clientset costs several megabytes.
func newPoster(base *rest.Config) (*poster, error) {
	scheme := runtime.NewScheme()
	gv := eventsv1.SchemeGroupVersion
	scheme.AddKnownTypes(gv, &eventsv1.Event{})
	metav1.AddToGroupVersion(scheme, gv)
	cfg := rest.CopyConfig(base)
	cfg.GroupVersion, cfg.APIPath = &gv, "/apis"
	cfg.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	cfg.QPS, cfg.RateLimiter = -1, nil
	client, err := rest.HTTPClientFor(cfg)
	if err != nil {
		return nil, fmt.Errorf("prepare the connection for Events: %w", err)
	}
	c, err := rest.RESTClientForConfigAndClient(cfg, client)
	if err != nil {
		return nil, fmt.Errorf("prepare a client for %s at the API server: %w", gv, err)
	}
	return &poster{client: c, close: client.CloseIdleConnections}, nil
}

// create posts an Event once. One that the server has already got through: only its answer was lost.
func (p *poster) create(ctx context.Context, e *eventsv1.Event) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	err := p.client.Post().Namespace(e.Namespace).Resource("events").MaxRetries(0).Body(e).Do(ctx).Error()
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err //nolint:wrapcheck // fail says what was asked for
}

// identify adds the UID of the object that an Event is about, without which kubectl describe does not show the Event
// with the object. The daemon keeps no UIDs, so it asks, and by a list as a Service proxy may not get single objects. An
// Event goes out without a UID if there is no answer.
func (p *poster) identify(ctx context.Context, ref *corev1.ObjectReference) {
	var path []string
	switch ref.Kind {
	case "Service":
		path = []string{"/api", corev1.SchemeGroupVersion.Version, "namespaces", ref.Namespace, "services"}
	case "EndpointSlice":
		gv := discoveryv1.SchemeGroupVersion
		path = []string{"/apis", gv.Group, gv.Version, "namespaces", ref.Namespace, "endpointslices"}
	default:
		return
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	data, err := p.client.Get().AbsPath(path...).MaxRetries(0).
		SetHeader("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1").
		Param("fieldSelector", fields.OneTermEqualSelector("metadata.name", ref.Name).String()).
		Param("resourceVersion", "0"). // from the server's cache
		Do(ctx).Raw()
	if err != nil {
		return
	}
	var list struct {
		Items []struct {
			Metadata struct {
				UID types.UID `json:"uid"`
			} `json:"metadata"`
		} `json:"items"`
	}
	if json.Unmarshal(data, &list) == nil && len(list.Items) == 1 {
		ref.UID = list.Items[0].Metadata.UID
	}
}

// hex writes a number in base 16.
func hex(n uint64) string { return strconv.FormatUint(n, 16) }
