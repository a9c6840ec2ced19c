// Package convert turns Kubernetes API objects into the values of package model, and decides what of an object is
// unusable: such a part is left out and described by a Finding, the rest of the object is used. It follows the API's
// own defaults, so hand-written manifests and objects from an API server read alike.
//
// It keeps no state, touches neither network nor files, and decides nothing about forwarding: that a valid object is
// ignored is for package forward to say. It must not import client-go; the neighbours kube and manifest call it.
package convert

import (
	"fmt"
	"strings"
	"unique"

	"github.com/turnout-proxy/turnout/internal/model"
)

// The reasons of the findings that this package makes.
const (
	// InvalidName: a name is empty, too long or has characters that names cannot have.
	InvalidName = "InvalidName"
	// InvalidIP: a value that should be an IP address is none.
	InvalidIP = "InvalidIP"
	// InvalidCIDR: a value that should be an address range is none.
	InvalidCIDR = "InvalidCIDR"
	// InvalidPort: a port number is missing or outside 1..65535.
	InvalidPort = "InvalidPort"
	// InvalidProtocol: a protocol is not TCP, UDP or SCTP.
	InvalidProtocol = "InvalidProtocol"
	// InvalidValue: another field has a value that the API does not know.
	InvalidValue = "InvalidValue"
	// DuplicatePort: two ports of one object share name and protocol.
	DuplicatePort = "DuplicatePort"
	// WrongFamily: an address is of the other IP family than its object says.
	WrongFamily = "WrongFamily"
	// ForbiddenAddress: an endpoint's address would lead to the node itself or to no single host.
	ForbiddenAddress = "ForbiddenAddress"
	// NoAddress: an endpoint has no address.
	NoAddress = "NoAddress"
	// NoServiceName: a slice does not say which Service it belongs to.
	NoServiceName = "NoServiceName"
	// UnsupportedAddressType: a slice's address type is neither IPv4 nor IPv6.
	UnsupportedAddressType = "UnsupportedAddressType"
	// NoClusterIP: a Service has no cluster IP though its type needs one.
	NoClusterIP = "NoClusterIP"
)

// Labels by which users take objects away from the node's Service proxy. The value does not matter.
const (
	// LabelForeignProxy on a Service gives it to another proxy.
	LabelForeignProxy = "service.kubernetes.io/service-proxy-name"
	// LabelHeadless on an EndpointSlice says that it belongs to a headless Service.
	LabelHeadless = "service.kubernetes.io/headless"
)

// maxPerReason is how many findings with one reason an object may have; the rest are counted in one more. It bounds
// what a slice of a thousand bad endpoints costs to report.
const maxPerReason = 5

// ServiceExcluded tells that a Service is not for this proxy, by its labels.
func ServiceExcluded(labels map[string]string) bool {
	_, ok := labels[LabelForeignProxy]
	return ok
}

// SliceExcluded tells that an EndpointSlice (or Endpoints object) is not for a proxy at all, by its labels.
func SliceExcluded(labels map[string]string) bool {
	_, ok := labels[LabelHeadless]
	return ok
}

// findings collects what is found about one object.
type findings struct {
	kind, object string
	list         []model.Finding
	more         map[string]int
}

// add notes one finding. The message names the field and the value, and says what happens and what to do.
func (f *findings) add(s model.Severity, reason, format string, args ...any) {
	n := 0
	for _, have := range f.list {
		if have.Reason == reason {
			n++
		}
	}
	if n >= maxPerReason {
		if f.more == nil {
			f.more = map[string]int{}
		}
		f.more[reason]++
		return
	}
	f.list = append(f.list, model.Finding{
		Severity: s, Kind: f.kind, Object: f.object, Reason: reason, Message: fmt.Sprintf(format, args...),
	})
}

// result gives the findings in the order they were made, followed by the counts of those that were left out.
func (f *findings) result() []model.Finding {
	if len(f.more) == 0 {
		return f.list
	}
	shown := f.list
	for i := range shown {
		n := f.more[shown[i].Reason]
		if n == 0 {
			continue
		}
		delete(f.more, shown[i].Reason)
		last := shown[i]
		last.Message = fmt.Sprintf("%d more of this kind", n)
		f.list = append(f.list, last)
	}
	return f.list
}

// maxQuoted is how many bytes of a bad value a message shows.
const maxQuoted = 80

// quote shows a user's value in a message: on one line, without control characters and not too long.
func quote(s string) string {
	if len(s) > maxQuoted {
		return fmt.Sprintf("%q and %d bytes more", s[:maxQuoted], len(s)-maxQuoted)
	}
	return fmt.Sprintf("%q", s)
}

// intern gives one shared copy of a string that many objects repeat, such as a node's name: 100,000 endpoints name a
// few thousand nodes and a handful of zones. The copy lives as long as somebody refers to it.
func intern(s string) string {
	if s == "" {
		return ""
	}
	return unique.Make(s).Value()
}

// objectName checks the identity of a namespaced object and gives it. Names go into kernel rules as text, so one with
// characters that the API forbids must not pass, wherever the object came from.
func (f *findings) objectName(namespace, name string) (model.Name, bool) {
	n := model.Name{Namespace: intern(namespace), Name: strings.Clone(name)}
	for _, part := range []struct{ field, value string }{{"metadata.namespace", namespace}, {"metadata.name", name}} {
		if !validName(part.value) {
			f.add(model.Error, InvalidName, "%s: %s is not a valid name, the object is ignored: use up to 253 lower-case "+
				"letters, digits, '-' and '.', with a letter or digit at both ends", part.field, quote(part.value))
			return n, false
		}
	}
	return n, true
}

// maxName is the longest name that any API object may have, in bytes.
const maxName = 253

// validName tells whether a name fits the widest rule that the API has for names (an RFC 1123 subdomain).
func validName(s string) bool {
	return len(s) > 0 && len(s) <= maxName && alphanumeric(s[0]) && alphanumeric(s[len(s)-1]) &&
		strings.IndexFunc(s, func(r rune) bool { return r > 127 || !alphanumeric(byte(r)) && r != '-' && r != '.' }) < 0
}

// maxPortName is the longest name of a port, in bytes.
const maxPortName = 63

// validPortName tells whether a port's name is empty or an RFC 1123 label.
func validPortName(s string) bool {
	return s == "" || len(s) <= maxPortName && validName(s) && !strings.Contains(s, ".")
}

func alphanumeric(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }
