package kube

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	protobufserializer "k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/rest"
)

// encoded gives a list as an API server sends it in protobuf.
func encoded(tb testing.TB, names ...string) []byte {
	tb.Helper()
	remaining := int64(7)
	list := &corev1.ServiceList{
		TypeMeta: metav1.TypeMeta{Kind: "ServiceList", APIVersion: "v1"},
		ListMeta: metav1.ListMeta{ResourceVersion: "42", Continue: "more", RemainingItemCount: &remaining},
	}
	for i, name := range names {
		list.Items = append(list.Items, *service(name, fmt.Sprintf("10.96.0.%d", i+1)))
	}
	var b bytes.Buffer
	if err := protobufserializer.NewSerializer(nil, nil).Encode(list, &b); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

// read reads an answer and gives its items in lines.
func read(tb testing.TB, data []byte) (*convertedList, []string, error) {
	tb.Helper()
	c, err := newClients(&rest.Config{Host: "http://127.0.0.1:1"})
	if err != nil {
		tb.Fatal(err)
	}
	s := &store{convert: serviceEvent}
	l := listReader{item: func() message { return &corev1.Service{} }, decode: c.decode, convert: s.toEvent}
	list, err := l.read(iotest.HalfReader(bytes.NewReader(data)))
	if err != nil {
		return nil, nil, err
	}
	var lines []string
	for _, o := range list.Items {
		c, ok := o.(*converted)
		if !ok {
			tb.Fatalf("an item is %T", o)
		}
		lines = append(lines, line(c.event))
	}
	return list, lines, nil
}

func TestAListIsReadItemByItem(t *testing.T) {
	json := `{"kind":"ServiceList","apiVersion":"v1","metadata":{"resourceVersion":"42","continue":"more","remainingItemCount":7},
		"items":[{"metadata":{"namespace":"shop","name":"web"},"spec":{"clusterIP":"10.96.0.1"}},
		{"metadata":{"namespace":"shop","name":"dns"},"spec":{"clusterIP":"10.96.0.2"}}]}`
	for name, data := range map[string][]byte{"protobuf": encoded(t, "web", "dns"), "json": []byte(json)} {
		t.Run(name, func(t *testing.T) {
			list, got, err := read(t, data)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff([]string{"put service shop/web [10.96.0.1]", "put service shop/dns [10.96.0.2]"}, got); diff != "" {
				t.Errorf("items (-want +got):\n%s", diff)
			}
			remaining := int64(7)
			want := metav1.ListMeta{ResourceVersion: "42", Continue: "more", RemainingItemCount: &remaining}
			if diff := cmp.Diff(want, list.ListMeta); diff != "" {
				t.Errorf("list (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAListThatIsCutShortIsAnError(t *testing.T) {
	data := encoded(t, "web", "dns")
	// The list is followed by two empty fields of the envelope; without them it is complete all the same.
	const trailer = len("\x1a\x00\x22\x00")
	for n := range len(data) - trailer {
		if _, got, err := read(t, data[:n]); err == nil {
			t.Errorf("of %d bytes, %d are taken for all: %q", len(data), n, got)
		}
	}
}

func TestUnknownFieldsOfAListAreSkipped(t *testing.T) {
	data := encoded(t, "web")
	// A varint, both fixed sizes and bytes, under numbers that nothing uses.
	extra := "\xf8\x01\x96\x01" + "\xf9\x01" + strings.Repeat("x", 8) + "\xfd\x01" + strings.Repeat("x", 4) + "\xfa\x01\x03abc"
	data = slices.Concat(data[:len(magic)], []byte(extra), data[len(magic):], []byte(extra))
	_, got, err := read(t, data)
	if diff := cmp.Diff([]string{"put service shop/web [10.96.0.1]"}, got); diff != "" || err != nil {
		t.Errorf("error %v, items (-want +got):\n%s", err, diff)
	}
}

func TestAMalformedListIsAnError(t *testing.T) {
	for name, tail := range map[string]string{
		"a size beyond the message":   "\x12\x05\x12\x10ab",
		"a size that overflows":       "\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
		"a group":                     "\x0b",
		"an object of absurd size":    "\x12\xff\xff\xff\xff\x0f\x12\xf0\xff\xff\xff\x0f",
		"an object that is no object": "\x12\x04\x12\x02\x0a\x7f",
	} {
		if _, got, err := read(t, []byte(magic+tail)); err == nil {
			t.Errorf("%s: no error, items %q", name, got)
		}
	}
	if _, _, err := read(t, []byte("<html>")); err == nil {
		t.Error("an answer in another language was taken for a list")
	}
	broken := errors.New("connection reset")
	c := func([]byte) (runtime.Object, error) { return nil, errors.New("not reached") }
	l := listReader{decode: c}
	if _, err := l.read(iotest.ErrReader(broken)); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
}

func FuzzAListNeverPanics(f *testing.F) {
	f.Add(encoded(f, "web", "dns"))
	f.Add([]byte(magic + "\x12\x05\x12\x10ab"))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, _, err := read(t, append([]byte(magic), data...))
		if err == nil && len(list.Items) > len(data) {
			t.Errorf("%d items of %d bytes", len(list.Items), len(data))
		}
	})
}
