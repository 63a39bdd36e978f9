//! Simple tokens. etcd: `server/auth/simple_token.go`.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::TokenChange;
use crate::clock;

/// Letters in front of the dot.
const LETTERS: usize = 16;
const ALPHABET: &[u8; 52] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
/// Least time between two looks at all tokens.
const SWEEP: Duration = Duration::from_secs(1);

type LettersDigest = [u8; 32];

/// The letters of a token in the making: only their digest leaves the member.
pub struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Draws letters.
    pub fn draw() -> Secret {
        let mut letters = String::with_capacity(LETTERS);
        while letters.len() < LETTERS {
            // 208 is the largest multiple of 52 in a byte: with what is above left out, all letters are equally likely.
            let drawn = clock::random::<LETTERS>().into_iter().filter(|byte| *byte < 208);
            for byte in drawn.take(LETTERS - letters.len()) {
                letters.push(char::from(ALPHABET[usize::from(byte) % ALPHABET.len()]));
            }
        }
        Secret(letters)
    }

    /// SHA-256 of the letters.
    pub fn digest(&self) -> Vec<u8> {
        Sha256::digest(self.0.as_bytes()).to_vec()
    }

    /// The token that the entry at `index` issues.
    pub fn token(self, index: u64) -> String {
        format!("{}.{index}", self.0)
    }
}

/// The tokens that this member takes.
pub struct Simple {
    ttl: Duration,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    issued: HashMap<LettersDigest, Issued>,
    /// Index of the first entry whose token counts.
    begin: u64,
    next_sweep: Option<Instant>,
}

struct Issued {
    user: String,
    index: u64,
    ends: Instant,
}

impl Simple {
    /// Keeps no token yet; each will live for `ttl` after its last use.
    pub fn new(ttl: Duration) -> Simple {
        Simple { ttl, kept: Mutex::default() }
    }

    /// The entry that a token names; `None` if it is no simple token.
    pub fn index(shown: &str) -> Option<u64> {
        let (_, index) = split(shown)?;
        index.parse().ok()
    }

    /// Whose token it is, and keeps it for another while; the entry that it names must have been applied.
    pub fn user(&self, shown: &str) -> Option<String> {
        self.user_at(shown, clock::now())
    }

    fn user_at(&self, shown: &str, now: Instant) -> Option<String> {
        let (letters, index) = split(shown)?;
        let digest: LettersDigest = Sha256::digest(letters.as_bytes()).into();
        let mut kept = self.kept.lock();
        kept.sweep(now);
        let issued = kept.issued.get_mut(&digest)?;
        if issued.ends < now || issued.index.to_string() != index {
            return None;
        }
        issued.ends = now + self.ttl;
        Some(issued.user.clone())
    }

    pub(super) fn begin_at(&self, index: u64) {
        self.kept.lock().begin = index;
    }

    pub(super) fn follow(&self, change: TokenChange, now: Instant) {
        let mut kept = self.kept.lock();
        match change {
            TokenChange::Issued { digest, user, index } => {
                kept.sweep(now);
                let Ok(digest) = LettersDigest::try_from(digest) else { return };
                if index >= kept.begin {
                    kept.issued.insert(digest, Issued { user, index, ends: now + self.ttl });
                }
            }
            TokenChange::UserVoid(user) => kept.issued.retain(|_, issued| issued.user != user),
            TokenChange::AllVoid => kept.issued.clear(),
        }
    }
}

impl Kept {
    /// Forgets now and then what has run out.
    fn sweep(&mut self, now: Instant) {
        if self.next_sweep.is_none_or(|next| next <= now) {
            self.issued.retain(|_, issued| issued.ends >= now);
            self.next_sweep = Some(now + SWEEP);
        }
    }
}

/// Letters and index.
fn split(shown: &str) -> Option<(&str, &str)> {
    shown.split_once('.').filter(|(_, index)| !index.contains('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(300);

    fn issue(tokens: &Simple, user: &str, index: u64, now: Instant) -> String {
        let secret = Secret::draw();
        tokens.follow(TokenChange::Issued { digest: secret.digest(), user: user.into(), index }, now);
        secret.token(index)
    }

    #[test]
    fn a_token_is_its_users_until_a_while_after_its_last_use() {
        let (tokens, start) = (Simple::new(TTL), clock::now());
        let shown = issue(&tokens, "alice", 7, start);
        assert_eq!(Simple::index(&shown), Some(7));
        for seconds in [0, 299, 599] {
            let now = start + Duration::from_secs(seconds);
            assert_eq!(tokens.user_at(&shown, now).as_deref(), Some("alice"), "after {seconds} s");
        }
        assert_eq!(tokens.user_at(&shown, start + Duration::from_secs(900)), None);
        assert!(tokens.kept.lock().issued.is_empty(), "it is swept");
    }

    #[test]
    fn only_the_very_token_counts() {
        let (tokens, now) = (Simple::new(TTL), clock::now());
        let shown = issue(&tokens, "alice", 7, now);
        let letters = shown.strip_suffix(".7").unwrap();
        let wrong = [
            "",
            ".",
            ".7",
            "7",
            letters,
            &format!("{letters}.8"),
            &format!("{letters}.07"),
            &format!("{shown}.7"),
        ];
        for wrong in wrong {
            assert_eq!(tokens.user_at(wrong, now), None, "{wrong}");
        }
        assert_eq!(tokens.user_at(&shown, now).as_deref(), Some("alice"));
    }

    #[test]
    fn tokens_are_void_with_their_user_with_all_and_from_an_earlier_life() {
        let (tokens, now) = (Simple::new(TTL), clock::now());
        let (a, b) = (issue(&tokens, "a", 1, now), issue(&tokens, "b", 2, now));
        tokens.follow(TokenChange::UserVoid("a".into()), now);
        assert_eq!((tokens.user_at(&a, now), tokens.user_at(&b, now).is_some()), (None, true));
        tokens.follow(TokenChange::AllVoid, now);
        assert_eq!(tokens.user_at(&b, now), None);
        tokens.begin_at(10);
        let (old, new) = (issue(&tokens, "a", 9, now), issue(&tokens, "a", 10, now));
        assert_eq!((tokens.user_at(&old, now), tokens.user_at(&new, now).is_some()), (None, true));
    }

    #[test]
    fn letters_are_drawn_from_all() {
        let drawn: String = (0..200).map(|_| Secret::draw().0).collect();
        assert_eq!(drawn.len(), 200 * LETTERS);
        assert!(ALPHABET.iter().all(|letter| drawn.as_bytes().contains(letter)));
    }
}
