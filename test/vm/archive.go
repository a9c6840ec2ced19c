package vm

import (
	"bytes"
	"fmt"
)

// An archive is a cpio archive in the form that the kernel unpacks as its initial file system: "newc", a header of
// hexadecimal numbers, the name and the data, each padded to four bytes. Source: the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst.
type archive struct {
	b bytes.Buffer
	n int
}

const (
	modeDir  = 0o040755
	modeFile = 0o100755
)

func (a *archive) dir(name string)               { a.add(name, modeDir, nil) }
func (a *archive) file(name string, data []byte) { a.add(name, modeFile, data) }

func (a *archive) add(name string, mode int, data []byte) {
	a.n++
	const links = 1
	// The fields: inode, mode, user, group, links, time, size, device (two numbers), device of a special file (two),
	// length of the name, checksum.
	fields := [13]int{a.n, mode, 0, 0, links, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0}
	a.b.WriteString("070701")
	for _, f := range fields {
		fmt.Fprintf(&a.b, "%08x", f)
	}
	a.b.WriteString(name + "\x00")
	a.pad()
	a.b.Write(data)
	a.pad()
}

func (a *archive) pad() {
	for a.b.Len()%4 != 0 {
		a.b.WriteByte(0)
	}
}

// close gives the whole archive.
func (a *archive) close() []byte {
	a.add("TRAILER!!!", 0, nil)
	return a.b.Bytes()
}
