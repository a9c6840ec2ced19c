package config

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// The ports that upstream serves health and metrics on.
const (
	healthzPort = 10256
	metricsPort = 10249
)

// DefaultMasqueradeBit is the bit of the packet mark that asks for masquerading.
const DefaultMasqueradeBit = 14

// defaultDrain is how long an endpoint may drain in IPVS mode.
const defaultDrain = 15 * time.Minute

// applyDefaults fills in what is absent, with upstream's values. A zero that upstream replaces is replaced here too.
func applyDefaults(c *v1alpha1.KubeProxyConfiguration) {
	c.APIVersion, c.Kind = fileVersion, fileKind
	defaultAddresses(c)
	setIfZero(&c.IPTables.SyncPeriod.Duration, 30*time.Second)
	setIfZero(&c.IPTables.MinSyncPeriod.Duration, time.Second)
	setIfZero(&c.IPVS.SyncPeriod.Duration, 30*time.Second)
	setIfZero(&c.NFTables.SyncPeriod.Duration, 30*time.Second)
	setIfZero(&c.NFTables.MinSyncPeriod.Duration, time.Second)
	setIfZero(&c.ConfigSyncPeriod.Duration, 15*time.Minute)
	setIfNil(&c.IPTables.MasqueradeBit, DefaultMasqueradeBit)
	setIfNil(&c.NFTables.MasqueradeBit, 14)
	setIfNil(&c.IPTables.LocalhostNodePorts, true)
	setIfNil(&c.OOMScoreAdj, -999)
	setIfNil(&c.Conntrack.MaxPerCore, 32<<10)
	setIfNil(&c.Conntrack.Min, 128<<10)
	setIfNil(&c.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: 24 * time.Hour})
	setIfNil(&c.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: time.Hour})
	setIfZero(&c.ClientConnection.ContentType, "application/vnd.kubernetes.protobuf")
	setIfZero(&c.ClientConnection.QPS, 5)
	setIfZero(&c.ClientConnection.Burst, 10)
	logsapi.SetRecommendedLoggingConfiguration(&c.Logging)
}

// defaultAddresses depend on the family of the bind address, so they come last for a file and first for flags.
func defaultAddresses(c *v1alpha1.KubeProxyConfiguration) {
	setIfZero(&c.BindAddress, "0.0.0.0")
	health, metrics := "0.0.0.0:10256", "127.0.0.1:10249"
	if a, err := parseAddr(c.BindAddress); err == nil && a.Is6() {
		health, metrics = "[::]:10256", "[::1]:10249"
	}
	setIfZero(&c.HealthzBindAddress, health)
	setIfZero(&c.MetricsBindAddress, metrics)
	c.HealthzBindAddress = withPort(c.HealthzBindAddress, healthzPort)
	c.MetricsBindAddress = withPort(c.MetricsBindAddress, metricsPort)
}

func setIfZero[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

func setIfNil[T any](p **T, value T) {
	if *p == nil {
		*p = &value
	}
}
