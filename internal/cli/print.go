package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"sigs.k8s.io/yaml"
)

// written gives what a print function returned, as an error of the command.
func written(_ int, err error) error {
	if err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

// printJSON writes an indented document.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return written(0, e.Encode(v))
}

// printYAML writes the same document as printJSON, as YAML.
func printYAML(w io.Writer, v any) error {
	text, err := yaml.Marshal(v)
	if err != nil {
		return fmt.Errorf("write YAML: %w", err)
	}
	return written(w.Write(text))
}

// orList joins words for a sentence: "a, b or c".
func orList(words []string) string {
	n := len(words)
	if n < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:n-1], ", ") + " or " + words[n-1]
}
