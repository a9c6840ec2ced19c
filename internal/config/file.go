package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

const (
	fileVersion = "kubeproxy.config.k8s.io/v1alpha1"
	fileKind    = "KubeProxyConfiguration"
	// maxFileBytes bounds what is read: the largest sensible file is some kilobytes.
	maxFileBytes = 4 << 20
)

// readFile reads a KubeProxyConfiguration, YAML or JSON. A field that the API does not have, or one that stands there
// twice, is not an error: the text of the complaint is returned for a warning and the rest of the file counts.
func readFile(path string) (cfg *v1alpha1.KubeProxyConfiguration, complaint string, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, "", fmt.Errorf("read configuration file: %w", err)
	}
	if info.Size() > maxFileBytes {
		return nil, "", fmt.Errorf("configuration file %s has %d bytes, more than %d", path, info.Size(), maxFileBytes)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, "", fmt.Errorf("read configuration file: %w", err)
	}
	cfg, complaint, err = decode(data)
	if err != nil {
		return nil, "", fmt.Errorf("configuration file %s: %w", path, err)
	}
	return cfg, complaint, nil
}

// decode does what readFile says, on bytes.
func decode(data []byte) (*v1alpha1.KubeProxyConfiguration, string, error) {
	cfg := &v1alpha1.KubeProxyConfiguration{}
	strict := yaml.UnmarshalStrict(data, cfg)
	if strict != nil {
		cfg = &v1alpha1.KubeProxyConfiguration{}
		if err := yaml.Unmarshal(data, cfg); err != nil {
			return nil, "", decodeError(err)
		}
	}
	if cfg.APIVersion != fileVersion || cfg.Kind != fileKind {
		return nil, "", fmt.Errorf("it is %q of %q, and must be kind %s of apiVersion %s",
			cfg.Kind, cfg.APIVersion, fileKind, fileVersion)
	}
	if strict != nil {
		return cfg, decodeError(strict).Error(), nil
	}
	return cfg, "", nil
}

// decodeError names the field where the decoder knows it, and drops the layers that the YAML library adds.
func decodeError(err error) error {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("failed to decode: %s has a %s where a %s belongs", wrong.Field, wrong.Value, wrong.Type)
	}
	for next := errors.Unwrap(err); next != nil; next = errors.Unwrap(err) {
		err = next
	}
	return fmt.Errorf("failed to decode: %w", err)
}
