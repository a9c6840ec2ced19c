package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// manifests is the directory that the daemons read, relative to the work directory; endpointsFile is the file in it that
// the demo changes.
const (
	manifests     = "manifests"
	endpointsFile = "web-endpoints.yaml"
)

// copyManifests copies the YAML files of a directory.
func copyManifests(from, to string) error {
	files, err := filepath.Glob(filepath.Join(from, "*.yaml"))
	if err != nil {
		return fmt.Errorf("list the examples in %s: %w", from, err)
	}
	if len(files) == 0 {
		return fmt.Errorf("directory %s has no YAML files", from)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return fmt.Errorf("read an example: %w", err)
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(f)), text, 0o644); err != nil {
			return fmt.Errorf("copy an example: %w", err)
		}
	}
	return nil
}

// removeEndpoint takes a pod out of every EndpointSlice of a file. The file is replaced in one step, as "kubectl apply",
// git and good editors do; the daemon never sees half of it.
func removeEndpoint(path, pod string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the endpoints: %w", err)
	}
	documents := strings.Split(string(text), "\n---\n")
	removed := 0
	for i, d := range documents {
		changed, n, err := withoutPod(d, pod)
		if err != nil {
			return fmt.Errorf("change document %d of %s: %w", i+1, path, err)
		}
		documents[i], removed = changed, removed+n
	}
	if removed == 0 {
		return fmt.Errorf("pod %s is in no EndpointSlice of %s", pod, path)
	}
	temporary := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".new")
	if err := os.WriteFile(temporary, []byte(strings.Join(documents, "---\n")), 0o644); err != nil {
		return fmt.Errorf("write the endpoints: %w", err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("replace the endpoints: %w", err)
	}
	return nil
}

// withoutPod gives an EndpointSlice without one pod, and how many entries that were.
func withoutPod(document, pod string) (string, int, error) {
	var slice map[string]any
	if err := yaml.Unmarshal([]byte(document), &slice); err != nil {
		return "", 0, fmt.Errorf("parse: %w", err)
	}
	endpoints, _ := slice["endpoints"].([]any)
	kept := make([]any, 0, len(endpoints))
	for _, e := range endpoints {
		entry, _ := e.(map[string]any)
		target, _ := entry["targetRef"].(map[string]any)
		if target["name"] != pod {
			kept = append(kept, e)
		}
	}
	slice["endpoints"] = kept
	out, err := yaml.Marshal(slice)
	if err != nil {
		return "", 0, fmt.Errorf("print: %w", err)
	}
	return string(out), len(endpoints) - len(kept), nil
}
