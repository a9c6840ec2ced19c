package manifest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	jsonserializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"sigs.k8s.io/yaml"

	"github.com/turnout-proxy/turnout/internal/model"
	"github.com/turnout-proxy/turnout/internal/watch/convert"
)

// The API's kinds that are read.
const (
	kindService   = "Service"
	kindSlice     = "EndpointSlice"
	kindEndpoints = "Endpoints"
	kindNode      = "Node"
)

// A key identifies an object among the manifests. Kind is the API's kind.
type key struct {
	kind string
	name model.Name
}

// String gives "Service shop/web".
func (k key) String() string {
	if k.name.Namespace == "" {
		return k.kind + " " + k.name.Name
	}
	return k.kind + " " + k.name.String()
}

// An object is what one document, or one item of a list, describes. For a valid object that this proxy has nothing to
// do with, and for an unusable one, service, slices and node are all nil.
type object struct {
	key      key
	service  *model.Service
	slices   []*model.EndpointSlice
	node     *model.Node
	findings []model.Finding
}

// usable tells that there is something to forward by.
func (o *object) usable() bool { return o.service != nil || len(o.slices) > 0 || o.node != nil }

// A problem is something wrong with a document. Line is relative to the document's first line, which is 0.
type problem struct {
	severity model.Severity
	reason   string
	line     int
	message  string
}

// Decoded is what came of one document.
type decoded struct {
	objects  []*object
	problems []problem
	// broken are the objects that the document describes in a way that cannot be used; with unknown set the document
	// might describe any.
	broken  []key
	unknown bool
}

// A document is one part of a multi-document file.
type document struct {
	text []byte
	line int // 1-based
}

// documents splits a file at the lines that begin with "---".
func documents(data []byte) []document {
	data = bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")) // the byte order mark that some editors write
	var docs []document
	start, startLine := 0, 1
	for pos, line := 0, 1; pos < len(data); line++ {
		end := len(data)
		if i := bytes.IndexByte(data[pos:], '\n'); i >= 0 {
			end = pos + i + 1
		}
		if isSeparator(data[pos:end]) {
			docs = appendDocument(docs, data[start:pos], startLine)
			// What follows the dashes on their line belongs to the document; the line counts as its first.
			start, startLine = pos+len("---"), line
		}
		pos = end
	}
	return appendDocument(docs, data[start:], startLine)
}

func isSeparator(line []byte) bool {
	rest, ok := bytes.CutPrefix(line, []byte("---"))
	return ok && (len(rest) == 0 || strings.ContainsRune(" \t\r\n", rune(rest[0])))
}

// appendDocument leaves out blank documents, and moves the start of the others to their first line that says something.
func appendDocument(docs []document, text []byte, line int) []document {
	for {
		i := bytes.IndexByte(text, '\n')
		head := text
		if i >= 0 {
			head = text[:i]
		}
		trimmed := bytes.TrimSpace(head)
		if len(trimmed) > 0 && trimmed[0] != '#' {
			return append(docs, document{text: text, line: line})
		}
		if i < 0 {
			return docs
		}
		text, line = text[i+1:], line+1
	}
}

// A reader decodes documents. It has no state that changes.
type reader struct {
	strict   runtime.Decoder
	nodeName string
}

func newReader(nodeName string) *reader {
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Service{}, &corev1.Node{},
		&corev1.Endpoints{}) //nolint:staticcheck // see convert.Endpoints
	scheme.AddKnownTypes(discoveryv1.SchemeGroupVersion, &discoveryv1.EndpointSlice{})
	return &reader{
		strict: jsonserializer.NewSerializerWithOptions(jsonserializer.DefaultMetaFactory, scheme, scheme,
			jsonserializer.SerializerOptions{Strict: true}),
		nodeName: nodeName,
	}
}

// head is what every object, and every list of objects, has.
type head struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"metadata"`
	Items []json.RawMessage `json:"items"`
}

// decode reads one document.
func (r *reader) decode(text []byte) *decoded {
	d := &decoded{}
	raw, ok := d.toJSON(text)
	if ok && string(raw) != "null" {
		r.object(d, raw, head{})
	}
	return d
}

// toJSON turns a document into JSON. A key that is given twice is reported, and the last one counts.
func (d *decoded) toJSON(text []byte) ([]byte, bool) {
	if t := bytes.TrimSpace(text); len(t) > 0 && t[0] == '{' && json.Valid(t) {
		return t, true
	}
	raw, err := yaml.YAMLToJSONStrict(text)
	if err == nil {
		return raw, true
	}
	line, message := yamlError(err)
	raw, lenient := yaml.YAMLToJSON(text)
	if lenient != nil {
		line, message = yamlError(lenient)
		d.problems = append(d.problems, problem{model.Error, InvalidDocument, line, message})
		d.unknown = true
		return nil, false
	}
	d.problems = append(d.problems, problem{model.Warning, UnknownField, line, message + ": remove one of the two"})
	return raw, true
}

// object reads one object or a list of them. Outer is the list that it is an item of.
func (r *reader) object(d *decoded, raw []byte, outer head) {
	var h head
	if err := json.Unmarshal(raw, &h); err != nil {
		d.fail(key{}, "the document is not an object with apiVersion, kind and metadata: "+err.Error())
		return
	}
	// The items of a ServiceList need not repeat what the list says.
	if kind, ok := strings.CutSuffix(outer.Kind, "List"); ok && kind != "" {
		if h.Kind == "" {
			h.Kind = kind
		}
		if h.APIVersion == "" {
			h.APIVersion = outer.APIVersion
		}
	}
	if h.Kind == "" || h.APIVersion == "" {
		d.fail(key{}, "kind or apiVersion is missing: each document needs both")
		return
	}
	if strings.HasSuffix(h.Kind, "List") && (h.Items != nil || h.Metadata.Name == "") {
		for _, item := range h.Items {
			r.object(d, item, h)
		}
		return
	}
	r.single(d, raw, h)
}

// single reads an object of a kind that matters here.
func (r *reader) single(d *decoded, raw []byte, h head) {
	var into runtime.Object
	namespace := h.Metadata.Namespace
	if namespace == "" {
		namespace = corev1.NamespaceDefault
	}
	switch h.APIVersion + " " + h.Kind {
	case "v1 Service":
		into = &corev1.Service{}
	case "v1 Endpoints":
		into = &corev1.Endpoints{} //nolint:staticcheck // see convert.Endpoints
	case "discovery.k8s.io/v1 EndpointSlice":
		into = &discoveryv1.EndpointSlice{}
	case "v1 Node":
		if h.Metadata.Name != r.nodeName {
			return
		}
		into, namespace = &corev1.Node{}, ""
	default:
		d.problems = append(d.problems, problem{model.Warning, IgnoredKind, 0, fmt.Sprintf(
			"kind %s of %s is not read here, the document is ignored: only v1 Service, Node and Endpoints and "+
				"discovery.k8s.io/v1 EndpointSlice are", h.Kind, h.APIVersion)})
		return
	}
	k := key{kind: h.Kind, name: model.Name{Namespace: namespace, Name: h.Metadata.Name}}
	gvk := schema.FromAPIVersionAndKind(h.APIVersion, h.Kind) // an item of a typed list need not repeat it
	_, _, err := r.strict.Decode(raw, &gvk, into)
	switch {
	case runtime.IsStrictDecodingError(err):
		d.problems = append(d.problems, problem{
			model.Warning, UnknownField, 0,
			fmt.Sprintf("%s: %s: the rest of the object "+
				"is used: correct the spelling or remove it", k,
				strings.TrimPrefix(err.Error(), "strict decoding error: ")),
		})
	case err != nil:
		d.fail(k, fmt.Sprintf("%s: %v", k, err))
		return
	}
	d.objects = append(d.objects, toModel(k, into))
}

// fail notes that an object cannot be read; a zero key means that it is not known which.
func (d *decoded) fail(k key, message string) {
	d.problems = append(d.problems, problem{model.Error, InvalidDocument, 0, message})
	if k == (key{}) {
		d.unknown = true
		return
	}
	d.broken = append(d.broken, k)
}

// toModel converts a decoded object, whose namespace may have been left to the default.
func toModel(k key, from runtime.Object) *object {
	o := &object{key: k}
	switch from := from.(type) {
	case *corev1.Service:
		from.Namespace = k.name.Namespace
		if !convert.ServiceExcluded(from.Labels) {
			o.service, o.findings = convert.Service(from)
		}
	case *discoveryv1.EndpointSlice:
		from.Namespace = k.name.Namespace
		if convert.SliceExcluded(from.Labels) {
			break
		}
		var s *model.EndpointSlice
		if s, o.findings = convert.EndpointSlice(from); s != nil {
			o.slices = []*model.EndpointSlice{s}
		}
	case *corev1.Endpoints: //nolint:staticcheck // see convert.Endpoints
		from.Namespace = k.name.Namespace
		if !convert.SliceExcluded(from.Labels) {
			o.slices, o.findings = convert.Endpoints(from)
		}
	case *corev1.Node:
		o.node, o.findings = convert.Node(from)
	}
	return o
}

// yamlError takes the line number out of a YAML error. The line is relative to the document's first, 0.
func yamlError(err error) (line int, message string) {
	message = err.Error()
	for _, prefix := range []string{"error converting YAML to JSON: ", "yaml: ", "unmarshal errors:\n  "} {
		message = strings.TrimPrefix(message, prefix)
	}
	m := regexp.MustCompile(`^line (\d+): `).FindStringSubmatch(message)
	if m == nil {
		return 0, message
	}
	if n, err := strconv.Atoi(m[1]); err == nil && n > 0 {
		line = n - 1
	}
	message, _, _ = strings.Cut(strings.TrimPrefix(message, m[0]), "\n")
	return line, message
}
