package cluster_test

import (
	"context"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/kube"
	"github.com/turnout-proxy/turnout/internal/watch/kube/event"
	"github.com/turnout-proxy/turnout/test/cluster"
)

// TestEventsReachARealAPIServer shows that the rights of a Service proxy suffice and that the server takes what is sent.
func TestEventsReachARealAPIServer(t *testing.T) {
	c := cluster.Start(t)
	client := c.Client()
	const eventsNote = 1024 // bytes that the server takes
	create(t, client, service("web"), slice("web-1", "web", "10.0.0.1"),
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
	rest, err := kube.RESTConfig(kube.Connection{Kubeconfig: c.Kubeconfig})
	if err != nil {
		t.Fatal(err)
	}
	p, err := event.New(event.Config{
		REST: rest, NodeName: "n1",
		Report: func(err error) { t.Errorf("an Event did not get through: %v", err) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run ended with %v", err)
		}
	}()
	p.Node("Starting", "", false)
	for _, f := range []model.Finding{
		{Kind: "Service", Object: "default/web", Reason: "PortRefused", Message: strings.Repeat("é", 2*eventsNote)},
		{Kind: "EndpointSlice", Object: "default/web-1", Reason: "BadAddress", Message: "m"},
		{Kind: "Service", Object: "default/gone", Reason: "Odd", Message: "m"},
	} {
		p.Publish(f)
	}
	got, n := map[string]eventsv1.Event{}, 0
	for end := time.Now().Add(deadline); n < 4 && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		n = 0
		list := must[*eventsv1.EventList](t)(client.EventsV1().Events("").List(t.Context(), metav1.ListOptions{}))
		for _, e := range list.Items {
			// The API server posts some, too, when it looks after addresses of Services.
			if e.ReportingController == "kube-proxy" {
				got[e.Regarding.Kind+" "+e.Regarding.Name] = e
				n++
			}
		}
	}
	web := must[*corev1.Service](t)(client.CoreV1().Services("default").Get(t.Context(), "web", metav1.GetOptions{}))
	if e := got["Service web"]; e.Regarding.UID != web.UID || e.Type != corev1.EventTypeWarning ||
		e.Reason != "PortRefused" || len(e.Note) > eventsNote {
		t.Errorf("the Event about web, whose UID is %s, is %+v", web.UID, e)
	}
	if e := got["Node n1"]; e.Namespace != "default" || e.Type != corev1.EventTypeNormal {
		t.Errorf("the Event about the Node is %+v", e)
	}
	if e := got["EndpointSlice web-1"]; e.Regarding.UID == "" {
		t.Errorf("the Event about the slice has no UID: %+v", e)
	}
	if _, ok := got["Service gone"]; !ok || n != 4 {
		t.Errorf("there are %d Events, want 4, one about what is gone among them", n)
	}
}
