package conformance

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"skeg.local/conformance/pair"
)

// keyFiles writes a key pair and returns the paths: public, private.
func keyFiles(t *testing.T, method string) (string, string) {
	t.Helper()
	dir := t.TempDir()
	public, private := filepath.Join(dir, "public.pem"), filepath.Join(dir, "private.pem")
	write := func(path, label string, der []byte, err error) {
		if err == nil {
			err = os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: label, Bytes: der}), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var key crypto.Signer
	var err error
	switch method[:2] {
	case "HS":
		if err := os.WriteFile(private, []byte("a secret of both"), 0o600); err != nil {
			t.Fatal(err)
		}
		return "", private
	case "RS", "PS":
		var made *rsa.PrivateKey
		made, err = rsa.GenerateKey(rand.Reader, 2048)
		key = made
		if method == "RS384" {
			// The older form of the file.
			write(private, "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(made), err)
		}
	case "ES":
		curve := map[string]elliptic.Curve{"ES256": elliptic.P256(), "ES384": elliptic.P384(), "ES512": elliptic.P521()}[method]
		var made *ecdsa.PrivateKey
		made, err = ecdsa.GenerateKey(curve, rand.Reader)
		key = made
		if method == "ES384" && err == nil {
			der, err := x509.MarshalECPrivateKey(made)
			write(private, "EC PRIVATE KEY", der, err)
		}
	default:
		_, key, err = ed25519.GenerateKey(rand.Reader)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(private); err != nil {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		write(private, "PRIVATE KEY", der, err)
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	write(public, "PUBLIC KEY", der, err)
	return public, private
}

// bearer returns a client with the token of a login, which is not recorded.
func (a asker) bearer(name string) asker {
	found := &pb.AuthenticateResponse{}
	err := a.s.Quietly("Auth/Authenticate", &pb.AuthenticateRequest{Name: name, Password: "pw-" + name}, found)
	a.s.Require(err == nil && strings.Count(found.Token, ".") == 2, "no JWT: %v", err)
	return asker{s: a.s, name: name, md: []string{"token", found.Token}}
}

// TestAuthJWT logs in at both stores with each way to sign, and shows each store the other's tokens.
func TestAuthJWT(t *testing.T) {
	for _, method := range []string{"HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"} {
		t.Run(method, func(t *testing.T) {
			public, private := keyFiles(t, method)
			option := "jwt,sign-method=" + method + ",priv-key=" + private + ",ttl=10m"
			if public != "" {
				option += ",pub-key=" + public
			}
			stores := freshPair(t, append([]string{"--auth-token", option}, cheap...)...)
			tokens := map[string]asker{}
			if difference := stores.Compare(func(s *pair.Session) {
				a := anonymous(s)
				town(a)
				a.enable()
				for _, user := range []string{"root", "alice"} {
					who := a.bearer(user)
					tokens[s.Store.Name+user] = who
					_ = who.ask("KV/Range", get("a"), &pb.RangeResponse{})
					_ = who.ask("KV/Put", put("a", "1"), &pb.PutResponse{})
					_ = who.ask("Auth/UserList", &pb.AuthUserListRequest{}, &pb.AuthUserListResponse{})
				}
				for _, wrong := range []string{"", "a.b.c", "a.b", "..", "abc.1"} {
					_ = asker{s: s, name: "wrong " + wrong, md: []string{"token", wrong}}.ask("KV/Range", get("a"), &pb.RangeResponse{})
				}
			}); difference != nil {
				t.Fatal("the stores differ:\n" + difference.Text)
			}
			if difference := stores.Compare(func(s *pair.Session) {
				other := stores.Skeg
				if s.Store == stores.Skeg {
					other = stores.Etcd
				}
				root, alice := tokens[other.Name+"root"], tokens[other.Name+"alice"]
				root.s, alice.s = s, s
				_ = alice.ask("KV/Range", get("a"), &pb.RangeResponse{})
				root.roleAdd("another")
				// All older tokens are, for keys; not for users and roles.
				_ = alice.ask("KV/Range", get("a"), &pb.RangeResponse{})
				_ = root.ask("KV/Range", get("a"), &pb.RangeResponse{})
				_ = root.ask("KV/Put", put("a", "1"), &pb.PutResponse{})
				_ = root.ask("Lease/LeaseGrant", &pb.LeaseGrantRequest{ID: 1, TTL: 100}, &pb.LeaseGrantResponse{})
				root.roleAdd("yet another")
				_ = anonymous(s).bearer("alice").ask("KV/Range", get("a"), &pb.RangeResponse{})
			}); difference != nil {
				t.Error("the stores differ over each other's tokens:\n" + difference.Text)
			}
		})
	}
}

// TestAuthJWTVerifyOnly gives both stores the public key alone: they make no tokens.
func TestAuthJWTVerifyOnly(t *testing.T) {
	public, _ := keyFiles(t, "ES256")
	check(t, []scenario{{name: "auth/11.3-verify-only", fresh: true, flags: append([]string{"--auth-token", "jwt,sign-method=ES256,pub-key=" + public}, cheap...), script: func(s *pair.Session) {
		a := anonymous(s)
		town(a)
		a.enable()
		_ = a.ask("Auth/Authenticate", &pb.AuthenticateRequest{Name: "alice", Password: "pw-alice"}, &pb.AuthenticateResponse{})
		_ = a.ask("Auth/Authenticate", &pb.AuthenticateRequest{Name: "alice", Password: "wrong"}, &pb.AuthenticateResponse{})
	}}})
}

// TestAuthJWTRotated replaces the key under a running member.
func TestAuthJWTRotated(t *testing.T) {
	_, private := keyFiles(t, "HS256")
	stores := freshPair(t, append([]string{"--auth-token", "jwt,sign-method=HS256,priv-key=" + private + ",ttl=10m"}, cheap...)...)
	onlySkeg(t, stores.Skeg)
	s := pair.NewSession(stores.Skeg)
	a := anonymous(s)
	town(a)
	a.enable()
	old := a.bearer("carl")
	if err := os.WriteFile(private, []byte("another secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); !strings.Contains(stores.Skeg.Log(), "the key of tokens was replaced"); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the key is not read again:\n" + stores.Skeg.Log())
		}
	}
	for _, who := range []asker{old, a.bearer("carl")} {
		if err := who.ask("KV/Range", get("a"), &pb.RangeResponse{}); err != nil {
			t.Error(err)
		}
	}
}
