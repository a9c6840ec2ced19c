package kube

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// A server that cannot stream its first state sends it as one list. The client library would hold such an answer whole,
// then decode it whole: at 10,000 Services with 10 endpoints each that is several times what remains of it. Here items
// are taken off the wire one by one and converted at once.

// magic begins every answer in the API's protobuf form.
const magic = "k8s\x00"

// maxItemBytes bounds one object of a list. The store behind an API server takes objects of some 1.5 MB.
const maxItemBytes = 64 << 20

// The numbers of fields in the protobuf form of answers.
// Source: runtime.Unknown and the list types in the API's generated.proto files; they are the same for every list.
const (
	unknownRaw    = 2
	listMetadata  = 1
	listItem      = 2
	wireVarint    = 0
	wireFixed64   = 1
	wireBytes     = 2
	wireFixed32   = 5
	wireTypeBits  = 3
	bytesOfFixed8 = 8
	bytesOfFixed4 = 4
)

// A convertedList is a list as a reflector wants it, with items that were converted already.
type convertedList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []runtime.Object
}

// DeepCopyObject gives the list itself: nobody changes it.
func (l *convertedList) DeepCopyObject() runtime.Object { return l }

// GetObjectKind and DeepCopyObject make an event pass for an API object in lists.
func (c *converted) GetObjectKind() schema.ObjectKind { return schema.EmptyObjectKind }

// DeepCopyObject gives the event itself: nobody changes it.
func (c *converted) DeepCopyObject() runtime.Object { return c }

// A message is an API object that reads itself from protobuf.
type message interface {
	runtime.Object
	Unmarshal(data []byte) error
}

// A listReader reads the answer to a list request and converts its items as they come.
type listReader struct {
	item    func() message                            // a new, empty object
	decode  func(data []byte) (runtime.Object, error) // reads answers in other forms than protobuf
	convert func(obj any) (*converted, error)

	out    convertedList
	buffer []byte // of the object that was read last
	begun  bool   // whether the list itself, and not only its envelope, was seen
}

// read reads a whole answer.
func (l *listReader) read(body io.Reader) (*convertedList, error) {
	in := &wire{r: bufio.NewReader(body), left: -1}
	if head, _ := in.r.Peek(len(magic)); string(head) != magic {
		return &l.out, l.readOther(in.r)
	}
	if err := in.skip(int64(len(magic))); err != nil {
		return nil, err
	}
	if err := in.fields(l.envelope); err != nil {
		return nil, err
	}
	if !l.begun {
		return nil, malformed(io.EOF) // it would read as an empty list, and everything as gone
	}
	return &l.out, nil
}

// envelope takes a field of what is around every answer.
func (l *listReader) envelope(field int, content *wire) error {
	if field != unknownRaw {
		return nil
	}
	l.begun = true
	return content.fields(l.field)
}

// field takes a field of the list.
func (l *listReader) field(field int, content *wire) error {
	var err error
	switch field {
	case listMetadata:
		if l.buffer, err = content.all(l.buffer); err != nil {
			return err
		}
		return l.out.ListMeta.Unmarshal(l.buffer) //nolint:wrapcheck // it names what it could not read
	case listItem:
		if l.buffer, err = content.all(l.buffer); err != nil {
			return err
		}
		o := l.item()
		if err := o.Unmarshal(l.buffer); err != nil {
			return err
		}
		return l.add(o)
	}
	return nil
}

func (l *listReader) add(o runtime.Object) error {
	c, err := l.convert(o)
	if err != nil {
		return err
	}
	l.out.Items = append(l.out.Items, c)
	return nil
}

// readOther reads an answer that is not protobuf.
func (l *listReader) readOther(body io.Reader) error {
	data, err := io.ReadAll(body)
	if err != nil {
		return fmt.Errorf("read a list: %w", err)
	}
	list, err := l.decode(data)
	if err != nil {
		return err
	}
	m, err := meta.ListAccessor(list)
	if err != nil {
		return fmt.Errorf("read a list: %w", err)
	}
	l.out.ResourceVersion, l.out.Continue = m.GetResourceVersion(), m.GetContinue()
	l.out.RemainingItemCount = m.GetRemainingItemCount()
	return meta.EachListItem(list, l.add) //nolint:wrapcheck // only what add gives comes back
}

// A wire reads protobuf fields.
type wire struct {
	r *bufio.Reader
	// left is how many bytes the message still has; -1 if it ends with the input.
	left int64
}

var errMalformed = errors.New("a list in protobuf is malformed")

// fields calls visit for each field of a message that has a length, with its content, and passes over the others.
// What visit leaves unread is skipped.
func (w *wire) fields(visit func(field int, content *wire) error) error {
	for w.left != 0 {
		tag, err := binary.ReadUvarint(w)
		if errors.Is(err, io.EOF) && w.left < 0 {
			return nil
		}
		if err != nil {
			return malformed(err)
		}
		switch tag & (1<<wireTypeBits - 1) {
		case wireVarint:
			_, err = binary.ReadUvarint(w)
		case wireFixed64:
			err = w.skip(bytesOfFixed8)
		case wireFixed32:
			err = w.skip(bytesOfFixed4)
		case wireBytes:
			err = w.bytesField(int(tag>>wireTypeBits), visit) //nolint:gosec // an overflow only gives an unknown field
		default:
			err = errMalformed
		}
		if err != nil {
			return malformed(err)
		}
	}
	return nil
}

func (w *wire) bytesField(field int, visit func(int, *wire) error) error {
	n, err := binary.ReadUvarint(w)
	if err != nil {
		return err //nolint:wrapcheck // fields does
	}
	size := int64(n) //nolint:gosec // a negative size is refused
	if size < 0 || w.left >= 0 && size > w.left {
		return errMalformed
	}
	content := &wire{r: w.r, left: size}
	if err := visit(field, content); err != nil {
		return err
	}
	if err := content.skip(content.left); err != nil {
		return err
	}
	if w.left >= 0 {
		w.left -= size
	}
	return nil
}

// malformed makes an end in the middle of a message an error of its own.
func malformed(err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: %w", errMalformed, io.ErrUnexpectedEOF)
	}
	return err
}

// ReadByte reads one byte of the message.
func (w *wire) ReadByte() (byte, error) {
	if w.left == 0 {
		return 0, io.EOF
	}
	b, err := w.r.ReadByte()
	if err == nil && w.left > 0 {
		w.left--
	}
	return b, err //nolint:wrapcheck // fields does
}

// all reads the rest of the message, into the buffer if that is large enough.
func (w *wire) all(buffer []byte) ([]byte, error) {
	if w.left > maxItemBytes {
		return buffer, fmt.Errorf("an object of a list has %d bytes, more than %d", w.left, maxItemBytes)
	}
	if int64(cap(buffer)) < w.left {
		buffer = make([]byte, w.left)
	}
	buffer = buffer[:w.left]
	w.left = 0
	_, err := io.ReadFull(w.r, buffer)
	return buffer, err //nolint:wrapcheck // fields does
}

// skip passes over bytes of the message.
func (w *wire) skip(n int64) error {
	if w.left >= 0 && n > w.left {
		return errMalformed
	}
	if _, err := io.CopyN(io.Discard, w.r, n); err != nil {
		return err //nolint:wrapcheck // fields does
	}
	if w.left >= 0 {
		w.left -= n
	}
	return nil
}
