//! Keys of JSON web tokens and what they sign with.

use aws_lc_rs::error::Unspecified;
use aws_lc_rs::hmac;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa;
use aws_lc_rs::signature::{self as sig, KeyPair, UnparsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// A way to sign, by its name in a token. They are etcd's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Hs256,
    Hs384,
    Hs512,
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    Es512,
    EdDsa,
}

use Method::{EdDsa, Es256, Es384, Es512, Hs256, Hs384, Hs512, Ps256, Ps384, Ps512, Rs256, Rs384, Rs512};

const METHODS: [(Method, &str); 13] = [
    (Hs256, "HS256"),
    (Hs384, "HS384"),
    (Hs512, "HS512"),
    (Rs256, "RS256"),
    (Rs384, "RS384"),
    (Rs512, "RS512"),
    (Ps256, "PS256"),
    (Ps384, "PS384"),
    (Ps512, "PS512"),
    (Es256, "ES256"),
    (Es384, "ES384"),
    (Es512, "ES512"),
    (EdDsa, "EdDSA"),
];

impl Method {
    pub(super) fn named(name: &str) -> Option<Method> {
        METHODS.iter().find(|(_, known)| *known == name).map(|(method, _)| *method)
    }

    pub(super) fn name(self) -> &'static str {
        METHODS.iter().find(|(method, _)| *method == self).map_or("", |(_, name)| name)
    }

    fn hmac(self) -> Option<hmac::Algorithm> {
        match self {
            Hs256 => Some(hmac::HMAC_SHA256),
            Hs384 => Some(hmac::HMAC_SHA384),
            Hs512 => Some(hmac::HMAC_SHA512),
            _ => None,
        }
    }

    fn verification(self) -> Option<&'static dyn sig::VerificationAlgorithm> {
        Some(match self {
            Hs256 | Hs384 | Hs512 => return None,
            Rs256 => &sig::RSA_PKCS1_2048_8192_SHA256,
            Rs384 => &sig::RSA_PKCS1_2048_8192_SHA384,
            Rs512 => &sig::RSA_PKCS1_2048_8192_SHA512,
            Ps256 => &sig::RSA_PSS_2048_8192_SHA256,
            Ps384 => &sig::RSA_PSS_2048_8192_SHA384,
            Ps512 => &sig::RSA_PSS_2048_8192_SHA512,
            Es256 => &sig::ECDSA_P256_SHA256_FIXED,
            Es384 => &sig::ECDSA_P384_SHA384_FIXED,
            Es512 => &sig::ECDSA_P521_SHA512_FIXED,
            EdDsa => &sig::ED25519,
        })
    }

    fn rsa(self) -> Option<&'static dyn sig::RsaEncoding> {
        Some(match self {
            Rs256 => &sig::RSA_PKCS1_SHA256,
            Rs384 => &sig::RSA_PKCS1_SHA384,
            Rs512 => &sig::RSA_PKCS1_SHA512,
            Ps256 => &sig::RSA_PSS_SHA256,
            Ps384 => &sig::RSA_PSS_SHA384,
            Ps512 => &sig::RSA_PSS_SHA512,
            _ => return None,
        })
    }

    fn ecdsa(self) -> Option<&'static sig::EcdsaSigningAlgorithm> {
        Some(match self {
            Es256 => &sig::ECDSA_P256_SHA256_FIXED_SIGNING,
            Es384 => &sig::ECDSA_P384_SHA384_FIXED_SIGNING,
            Es512 => &sig::ECDSA_P521_SHA512_FIXED_SIGNING,
            _ => return None,
        })
    }
}

/// Why there is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum KeyError {
    /// Neither file is given, or the one that is needed.
    #[error("auth: missing key data")]
    Missing,
    /// It is none for this method.
    #[error("auth: a key file holds no key for the signing method")]
    Unreadable,
    /// They are not of one pair.
    #[error("auth: public and private keys don't match")]
    Mismatch,
}

enum Private {
    Rsa(rsa::KeyPair),
    Ecdsa(sig::EcdsaKeyPair),
    Ed25519(sig::Ed25519KeyPair),
}

enum Secret {
    Shared(Box<hmac::Key>),
    Pair { private: Option<Private>, public: Vec<u8> },
}

/// A key that verifies, and signs if it has its private part.
pub(super) struct Key {
    method: Method,
    secret: Secret,
}

impl Key {
    /// Reads a key from the content of its files; an empty one is not given.
    pub(super) fn read(method: Method, public: &[u8], private: &[u8]) -> Result<Key, KeyError> {
        if let Some(algorithm) = method.hmac() {
            if private.is_empty() {
                return Err(KeyError::Missing);
            }
            return Ok(Key { method, secret: Secret::Shared(Box::new(hmac::Key::new(algorithm, private))) });
        }
        let public = match public {
            [] => None,
            pem => Some(read_public(pem)?),
        };
        let private = match private {
            [] => None,
            pem => Some(read_private(method, pem)?),
        };
        let of_private = private.as_ref().map(Private::public);
        let both = of_private.is_some() && public.is_some();
        let given = public.clone();
        let key = Key {
            method,
            secret: Secret::Pair { public: of_private.or(public).ok_or(KeyError::Missing)?, private },
        };
        if both {
            // What one signs, the other must verify.
            let probe = key.sign(b"probe").and_then(Result::ok).ok_or(KeyError::Unreadable)?;
            let other =
                Key { method, secret: Secret::Pair { public: given.unwrap_or_default(), private: None } };
            if !other.verifies(b"probe", &probe) {
                return Err(KeyError::Mismatch);
            }
        }
        Ok(key)
    }

    /// Signs; `None` without the private part.
    pub(super) fn sign(&self, message: &[u8]) -> Option<Result<Vec<u8>, Unspecified>> {
        let random = SystemRandom::new();
        match &self.secret {
            Secret::Shared(key) => Some(Ok(hmac::sign(key, message).as_ref().to_vec())),
            Secret::Pair { private: None, .. } => None,
            Secret::Pair { private: Some(Private::Rsa(pair)), .. } => {
                let encoding = self.method.rsa()?;
                let mut signature = vec![0; pair.public_modulus_len()];
                Some(pair.sign(encoding, &random, message, &mut signature).map(|()| signature))
            }
            Secret::Pair { private: Some(Private::Ecdsa(pair)), .. } => {
                Some(pair.sign(&random, message).map(|signature| signature.as_ref().to_vec()))
            }
            Secret::Pair { private: Some(Private::Ed25519(pair)), .. } => {
                Some(Ok(pair.sign(message).as_ref().to_vec()))
            }
        }
    }

    /// True if the signature is one of the message.
    pub(super) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match (&self.secret, self.method.verification()) {
            (Secret::Shared(key), _) => hmac::verify(key, message, signature).is_ok(),
            (Secret::Pair { public, .. }, Some(algorithm)) => {
                UnparsedPublicKey::new(algorithm, public).verify(message, signature).is_ok()
            }
            (Secret::Pair { .. }, None) => false,
        }
    }
}

impl Private {
    fn public(&self) -> Vec<u8> {
        match self {
            Private::Rsa(pair) => pair.public_key().as_ref().to_vec(),
            Private::Ecdsa(pair) => pair.public_key().as_ref().to_vec(),
            Private::Ed25519(pair) => pair.public_key().as_ref().to_vec(),
        }
    }
}

fn read_private(method: Method, pem: &[u8]) -> Result<Private, KeyError> {
    let (label, der) = decode_pem(pem).ok_or(KeyError::Unreadable)?;
    let pkcs8 = label == "PRIVATE KEY";
    if method.rsa().is_some() {
        let pair = if pkcs8 { rsa::KeyPair::from_pkcs8(&der) } else { rsa::KeyPair::from_der(&der) };
        return pair.map(Private::Rsa).map_err(|_| KeyError::Unreadable);
    }
    if let Some(algorithm) = method.ecdsa() {
        let pair = if pkcs8 {
            sig::EcdsaKeyPair::from_pkcs8(algorithm, &der)
        } else {
            sig::EcdsaKeyPair::from_private_key_der(algorithm, &der)
        };
        return pair.map(Private::Ecdsa).map_err(|_| KeyError::Unreadable);
    }
    let pair = sig::Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der);
    pair.map(Private::Ed25519).map_err(|_| KeyError::Unreadable)
}

/// The DER of a public key, which the library reads when it verifies.
fn read_public(pem: &[u8]) -> Result<Vec<u8>, KeyError> {
    match decode_pem(pem) {
        Some((label, der)) if label.ends_with("PUBLIC KEY") => Ok(der),
        _ => Err(KeyError::Unreadable),
    }
}

/// Label and content of the first block.
fn decode_pem(pem: &[u8]) -> Option<(String, Vec<u8>)> {
    let text = std::str::from_utf8(pem).ok()?;
    let (_, rest) = text.split_once("-----BEGIN ")?;
    let (label, rest) = rest.split_once("-----")?;
    let (body, _) = rest.split_once("-----END ")?;
    let body: String = body.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    Some((label.to_owned(), STANDARD.decode(body).ok()?))
}
