//! JSON web tokens: signed here, verified by any member that has the key. etcd: `server/auth/jwt.go`.
//!
//! `base64url({"alg","typ"}) . base64url({"exp","revision","username"}) . base64url(signature)`
//!
//! Key files are read again now and then. A key that was replaced verifies for as long as the tokens live that it signed, so that
//! members which are given the new one a while apart go on taking each other's tokens.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use std::{fs, io};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use parking_lot::{Mutex, RwLock};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::keys::{Key, KeyError, Method};
use crate::auth::Identity;
use crate::clock;

/// Life of a token unless told otherwise.
const TTL_DEFAULT: Duration = Duration::from_secs(300);
/// Verified tokens remembered, so that a client's next request costs no signature.
const REMEMBERED_MAX: usize = 4096;

/// Why a token cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignError {
    /// Only the public key is there.
    #[error("auth: token signing attempted with verify-only key")]
    VerifyOnly,
    /// The library failed.
    #[error("auth: a token could not be signed")]
    Failed,
}

/// Where keys are, and how tokens are made of them.
struct Settings {
    method: Method,
    public: Option<String>,
    private: Option<String>,
    ttl: Duration,
}

/// Makes and verifies tokens.
pub struct Jwt {
    settings: Settings,
    keys: RwLock<Keys>,
    verified: Mutex<HashMap<[u8; 32], Verified>>,
}

struct Keys {
    key: Key,
    /// What the files held.
    files: Vec<u8>,
    /// Replaced ones, and until when they verify, in seconds since 1970.
    replaced: Vec<(Key, u64)>,
}

struct Verified {
    who: Identity,
    /// Seconds since 1970.
    expires: u64,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
}

#[derive(Serialize)]
struct Claims<'c> {
    exp: u64,
    revision: u64,
    username: &'c str,
}

impl Jwt {
    /// Reads the options behind `jwt,`, and the keys that they name.
    ///
    /// # Errors
    /// What is wrong, without what a key holds.
    pub(super) fn from_options(options: &BTreeMap<String, String>) -> Result<Jwt, String> {
        let get = |name: &str| options.get(name).filter(|value| !value.is_empty()).cloned();
        let method = get("sign-method").and_then(|method| Method::named(&method));
        let method = method.ok_or("auth: invalid auth signature method")?;
        let ttl = match get("ttl") {
            None => TTL_DEFAULT,
            Some(text) => crate::config::duration(&text).ok_or("auth: invalid auth options: ttl")?,
        };
        for name in options.keys().filter(|name| !KNOWN.contains(&name.as_str())) {
            tracing::warn!(option = name, "unknown JWT option");
        }
        let settings = Settings { method, public: get("pub-key"), private: get("priv-key"), ttl };
        let files = settings.read().map_err(|error| format!("auth: a key file cannot be read: {error}"))?;
        let key = settings.key(&files).map_err(|error| error.to_string())?;
        let keys = RwLock::new(Keys { key, files: files.concat(), replaced: Vec::new() });
        Ok(Jwt { settings, keys, verified: Mutex::default() })
    }

    /// Signs a token for a user as of an auth revision.
    ///
    /// # Errors
    /// [`SignError`].
    pub fn sign(&self, user: &str, revision: u64) -> Result<String, SignError> {
        let exp = now().saturating_add(self.settings.ttl.as_secs());
        let claims =
            serde_json::to_vec(&Claims { exp, revision, username: user }).map_err(|_| SignError::Failed)?;
        let header = format!("{{\"alg\":\"{}\",\"typ\":\"JWT\"}}", self.settings.method.name());
        let signed = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
        let signature = self.keys.read().key.sign(signed.as_bytes());
        let signature = signature.ok_or(SignError::VerifyOnly)?.map_err(|_| SignError::Failed)?;
        Ok(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// Who a token was made for, and as of which auth revision.
    pub fn verify(&self, shown: &str) -> Option<Identity> {
        self.verify_at(shown, now())
    }

    fn verify_at(&self, shown: &str, now: u64) -> Option<Identity> {
        let digest: [u8; 32] = Sha256::digest(shown.as_bytes()).into();
        if let Some(verified) = self.verified.lock().get(&digest) {
            return (now < verified.expires).then(|| verified.who.clone());
        }
        let (signed, signature) = shown.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.').filter(|(_, claims)| !claims.contains('.'))?;
        let header: Header = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(header).ok()?).ok()?;
        if header.alg != self.settings.method.name() {
            return None;
        }
        let signature = URL_SAFE_NO_PAD.decode(signature).ok()?;
        {
            let keys = self.keys.read();
            let replaced = keys.replaced.iter().filter(|(_, until)| now < *until).map(|(key, _)| key);
            if !std::iter::once(&keys.key)
                .chain(replaced)
                .any(|key| key.verifies(signed.as_bytes(), &signature))
            {
                return None;
            }
        }
        let claims: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
        let (who, expires) = read_claims(&claims, now)?;
        let mut verified = self.verified.lock();
        if verified.len() >= REMEMBERED_MAX {
            verified.retain(|_, verified| now < verified.expires);
        }
        if verified.len() < REMEMBERED_MAX {
            verified.insert(digest, Verified { who: who.clone(), expires });
        }
        Some(who)
    }

    /// Reads the key files again; true if there is another key. What cannot be read, or is no key, changes nothing.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn reload(&self) -> Result<bool, String> {
        let files = self.settings.read().map_err(|error| error.to_string())?;
        if files.concat() == self.keys.read().files {
            return Ok(false);
        }
        let key = self.settings.key(&files).map_err(|error| error.to_string())?;
        let mut keys = self.keys.write();
        let old = std::mem::replace(&mut keys.key, key);
        let until = now().saturating_add(self.settings.ttl.as_secs());
        keys.replaced.retain(|(_, until)| now() < *until);
        keys.replaced.push((old, until));
        keys.files = files.concat();
        // A token of a key that is gone must not be remembered for longer than the key.
        self.verified.lock().clear();
        Ok(true)
    }
}

/// etcd's options.
const KNOWN: [&str; 4] = ["sign-method", "pub-key", "priv-key", "ttl"];

impl Settings {
    /// The files' content: public, private.
    fn read(&self) -> io::Result<[Vec<u8>; 2]> {
        let read = |path: &Option<String>| path.as_ref().map_or(Ok(Vec::new()), fs::read);
        Ok([read(&self.public)?, read(&self.private)?])
    }

    fn key(&self, [public, private]: &[Vec<u8>; 2]) -> Result<Key, KeyError> {
        Key::read(self.method, public, private)
    }
}

/// Who, and until when, of claims that are good now.
fn read_claims(claims: &Value, now: u64) -> Option<(Identity, u64)> {
    let time = |name: &str| match claims.get(name) {
        None => Some(None),
        Some(value) => value.as_f64().map(Some),
    };
    let seconds = clamped(time("exp")?.unwrap_or(f64::MAX));
    let not_before = clamped(time("nbf")?.unwrap_or(0.0));
    if now >= seconds || now < not_before {
        return None;
    }
    let name = claims.get("username")?.as_str()?.to_owned();
    let revision = claims.get("revision")?.as_f64()?;
    Some((Identity { name, auth_revision: clamped(revision) }, seconds))
}

/// A number of the claims as a whole one; beyond the range its end.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast from a float saturates")]
fn clamped(number: f64) -> u64 {
    number as u64
}

fn now() -> u64 {
    clock::unix_millis() / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "sesame";

    fn jwt(dir: &std::path::Path, secret: &str, ttl: &str) -> Jwt {
        let path = dir.join("secret");
        fs::write(&path, secret).unwrap();
        let path = path.to_str().unwrap().to_owned();
        let options = [("sign-method", "HS256".to_owned()), ("priv-key", path), ("ttl", ttl.to_owned())];
        let options = options.map(|(name, value)| (name.to_owned(), value)).into();
        Jwt::from_options(&options).unwrap()
    }

    /// A token with these claims, signed as it should be.
    fn with_claims(jwt: &Jwt, header: &str, claims: &str) -> String {
        let signed = format!("{}.{}", URL_SAFE_NO_PAD.encode(header), URL_SAFE_NO_PAD.encode(claims));
        let signature = jwt.keys.read().key.sign(signed.as_bytes()).unwrap().unwrap();
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    #[test]
    fn a_token_says_who_until_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let jwt = jwt(dir.path(), SECRET, "60s");
        let shown = jwt.sign("alice", 7).unwrap();
        let who = Identity { name: "alice".into(), auth_revision: 7 };
        assert_eq!(jwt.verify(&shown), Some(who.clone()));
        assert_eq!(jwt.verify(&shown), Some(who), "also from memory");
        assert_eq!(jwt.verify_at(&shown, now() + 61), None);
        jwt.verified.lock().clear();
        assert_eq!(jwt.verify_at(&shown, now() + 61), None);
    }

    #[test]
    fn what_is_changed_or_says_less_is_no_token() {
        let dir = tempfile::tempdir().unwrap();
        let jwt = jwt(dir.path(), SECRET, "60s");
        let shown = jwt.sign("alice", 7).unwrap();
        let (signed, signature) = shown.rsplit_once('.').unwrap();
        let (header, claims) = signed.split_once('.').unwrap();
        let other = jwt.sign("root", 7).unwrap();
        let other_claims = other.split('.').nth(1).unwrap();
        let none = URL_SAFE_NO_PAD.encode("{\"alg\":\"none\"}");
        for wrong in [
            String::new(),
            "..".into(),
            signed.into(),
            format!("{signed}."),
            format!("{header}.{other_claims}.{signature}"),
            format!("{none}.{claims}."),
            format!("{none}.{claims}.{signature}"),
            format!("{shown}.x"),
            format!("{shown}="),
        ] {
            assert_eq!(jwt.verify(&wrong), None, "{wrong}");
        }
        let header = "{\"alg\":\"HS256\"}";
        let good = "\"username\":\"a\",\"revision\":1";
        assert!(jwt.verify(&with_claims(&jwt, header, &format!("{{{good}}}"))).is_some());
        assert!(jwt.verify(&with_claims(&jwt, "{\"alg\":\"HS512\"}", &format!("{{{good}}}"))).is_none());
        for claims in [
            "{}",
            "[]",
            "{\"username\":\"a\"}",
            "{\"revision\":1}",
            "{\"username\":1,\"revision\":1}",
            "{\"username\":\"a\",\"revision\":\"1\"}",
            "{\"username\":\"a\",\"revision\":1,\"exp\":1}",
            "{\"username\":\"a\",\"revision\":1,\"exp\":\"9999999999\"}",
            "{\"username\":\"a\",\"revision\":1,\"nbf\":9999999999}",
        ] {
            assert_eq!(jwt.verify(&with_claims(&jwt, header, claims)), None, "{claims}");
        }
    }

    #[test]
    fn a_replaced_key_verifies_for_as_long_as_its_tokens_live() {
        let dir = tempfile::tempdir().unwrap();
        let jwt = jwt(dir.path(), SECRET, "60s");
        let old = jwt.sign("alice", 7).unwrap();
        assert_eq!(jwt.reload(), Ok(false));
        fs::write(dir.path().join("secret"), "another").unwrap();
        assert_eq!(jwt.reload(), Ok(true));
        let new = jwt.sign("alice", 7).unwrap();
        assert!(old != new && jwt.verify(&old).is_some() && jwt.verify(&new).is_some());
        jwt.keys.write().replaced.clear();
        jwt.verified.lock().clear();
        assert!(jwt.verify(&old).is_none() && jwt.verify(&new).is_some());
        fs::remove_file(dir.path().join("secret")).unwrap();
        assert!(jwt.reload().is_err() && jwt.verify(&new).is_some());
    }

    #[test]
    fn options_are_etcds() {
        let refused = |options: &[(&str, &str)]| {
            let options =
                options.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            Jwt::from_options(&options).err().unwrap()
        };
        assert_eq!(refused(&[]), "auth: invalid auth signature method");
        assert_eq!(refused(&[("sign-method", "none")]), "auth: invalid auth signature method");
        assert_eq!(refused(&[("sign-method", "RS256")]), "auth: missing key data");
        assert_eq!(refused(&[("sign-method", "HS256"), ("pub-key", "/dev/null")]), "auth: missing key data");
        assert!(refused(&[("sign-method", "ES512"), ("pub-key", "/nowhere")]).contains("cannot be read"));
        assert!(refused(&[("sign-method", "ES512"), ("ttl", "soon")]).contains("ttl"));
    }
}
