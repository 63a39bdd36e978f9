package boot

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// certificates is what one control plane needs to trust its own parts: an authority, a serving pair, a client pair for each
// user, and the key that signs service account tokens. All are files in one folder, readable by their owner only.
type certificates struct {
	folder    string
	authority *x509.Certificate
	key       *ecdsa.PrivateKey
}

// Names of the pairs: NAME.crt and NAME.key in the folder.
const (
	authorityPair      = "ca"
	servingPair        = "serving"
	adminPair          = "admin"
	controllersPair    = "kube-controller-manager"
	schedulerPair      = "kube-scheduler"
	serviceAccountPair = "service-account"
)

// makeCertificates writes a new set, good for a year.
func makeCertificates(folder string) (*certificates, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("making the folder of certificates: %w", err)
	}
	set := &certificates{folder: folder}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the authority's key: %w", err)
	}
	authority := certificate("skeg control plane")
	authority.IsCA, authority.BasicConstraintsValid = true, true
	authority.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	set.authority, set.key = authority, key
	if err := set.write(authorityPair, authority, key); err != nil {
		return nil, err
	}

	serving := certificate("kube-apiserver")
	serving.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	serving.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv6loopback, net.IPv4(10, 0, 0, 1)}
	serving.DNSNames = []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	if err := set.issue(servingPair, serving); err != nil {
		return nil, err
	}
	for _, user := range []struct{ pair, name, group string }{
		{adminPair, "admin", "system:masters"},
		{controllersPair, "system:kube-controller-manager", ""},
		{schedulerPair, "system:kube-scheduler", ""},
	} {
		client := certificate(user.name)
		if user.group != "" {
			client.Subject.Organization = []string{user.group}
		}
		client.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		if err := set.issue(user.pair, client); err != nil {
			return nil, err
		}
	}
	return set, set.issue(serviceAccountPair, certificate("service accounts"))
}

func certificate(name string) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		Subject:   pkix.Name{CommonName: name},
		NotBefore: now.Add(-time.Hour),
		NotAfter:  now.Add(365 * 24 * time.Hour),
		KeyUsage:  x509.KeyUsageDigitalSignature,
	}
}

// issue makes a key, has the authority sign the certificate for it, and writes both.
func (c *certificates) issue(pair string, template *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("making the key of %s: %w", pair, err)
	}
	return c.write(pair, template, key)
}

func (c *certificates) write(pair string, template *x509.Certificate, key *ecdsa.PrivateKey) error {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return fmt.Errorf("drawing the serial number of %s: %w", pair, err)
	}
	template.SerialNumber = serial
	signed, err := x509.CreateCertificate(rand.Reader, template, c.authority, &key.PublicKey, c.key)
	if err != nil {
		return fmt.Errorf("signing %s: %w", pair, err)
	}
	encoded, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("encoding the key of %s: %w", pair, err)
	}
	if err := writePEM(c.certificate(pair), "CERTIFICATE", signed); err != nil {
		return err
	}
	return writePEM(c.privateKey(pair), "EC PRIVATE KEY", encoded)
}

func writePEM(path, kind string, content []byte) error {
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: content}), 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}

func (c *certificates) certificate(pair string) string { return filepath.Join(c.folder, pair+".crt") }
func (c *certificates) privateKey(pair string) string  { return filepath.Join(c.folder, pair+".key") }

// client is a TLS configuration that trusts the authority and shows the pair.
func (c *certificates) client(pair string) (*tls.Config, error) {
	shown, err := tls.LoadX509KeyPair(c.certificate(pair), c.privateKey(pair))
	if err != nil {
		return nil, fmt.Errorf("loading %s: %w", pair, err)
	}
	authority, err := os.ReadFile(c.certificate(authorityPair))
	if err != nil {
		return nil, fmt.Errorf("reading the authority: %w", err)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(authority)
	return &tls.Config{Certificates: []tls.Certificate{shown}, RootCAs: trusted}, nil
}

// kubeconfig writes a file that makes a client the user of the pair, and returns its path.
func (c *certificates) kubeconfig(pair, server string) (string, error) {
	path := filepath.Join(c.folder, pair+".kubeconfig")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters:
- name: skeg
  cluster: {server: %q, certificate-authority: %q}
users:
- name: %[3]s
  user: {client-certificate: %[4]q, client-key: %[5]q}
contexts:
- name: skeg
  context: {cluster: skeg, user: %[3]s}
current-context: skeg
`, server, c.certificate(authorityPair), pair, c.certificate(pair), c.privateKey(pair))
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return "", fmt.Errorf("writing %s: %w", path, err)
	}
	return path, nil
}
