//! Passwords and their bcrypt hashes. Slow on purpose: never to be called on the core thread.

use base64::Engine as _;
use base64::alphabet::BCRYPT;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, NO_PAD};
use bytes::Bytes;
use subtle::ConstantTimeEq;

/// Costs that there are: the logarithm of the number of rounds.
pub const COSTS: std::ops::RangeInclusive<u32> = 4..=31;
/// The cost unless told otherwise.
pub const COST_DEFAULT: u32 = 10;
/// Bytes of a salt.
pub const SALT_BYTES: usize = 16;
/// Longest password; more bytes would not count.
const PASSWORD_BYTES_MAX: usize = 72;
/// Bytes of the hash that are stored: all but the last.
const HASH_BYTES: usize = 23;
/// Characters of a salt and a hash.
const SALT_CHARS: usize = 22;
const HASH_CHARS: usize = 31;

const BASE64: GeneralPurpose = GeneralPurpose::new(&BCRYPT, NO_PAD);
/// As Go's decoder reads: the bits behind the last byte may be anything.
const LENIENT: GeneralPurposeConfig = GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true);

/// The password is over the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bcrypt: password length exceeds {PASSWORD_BYTES_MAX} bytes")]
pub struct TooLong;

/// Hashes a password with a salt drawn by the caller; the cost must be one of [`COSTS`].
///
/// # Errors
/// [`TooLong`].
pub fn hash(password: &[u8], cost: u32, salt: [u8; SALT_BYTES]) -> Result<Bytes, TooLong> {
    if password.len() > PASSWORD_BYTES_MAX {
        return Err(TooLong);
    }
    let hash = digest(password, cost, salt);
    Ok(format!("$2a${cost:02}${}{}", BASE64.encode(salt), BASE64.encode(hash)).into())
}

/// True if the hash is one of the password. A hash that is none fits no password.
pub fn fits(password: &[u8], hash: &[u8]) -> bool {
    let Some((cost, salt, stored)) = parse(hash) else { return false };
    digest(password, cost, salt).ct_eq(&stored).into()
}

/// Takes as long as [`fits`] with a hash of this cost, for a user that does not exist.
pub fn fits_nobody(password: &[u8], cost: u32) {
    std::hint::black_box(digest(password, cost, [0; SALT_BYTES]));
}

/// Reads a hash as a client gives it, in base64. etcd: `selectPassword`.
pub fn decode_hash(base64: &str) -> Option<Bytes> {
    let text: String = base64.chars().filter(|c| !matches!(c, '\r' | '\n')).collect();
    let engine = GeneralPurpose::new(&base64::alphabet::STANDARD, LENIENT);
    engine.decode(text).ok().map(Bytes::from)
}

fn digest(password: &[u8], cost: u32, salt: [u8; SALT_BYTES]) -> [u8; HASH_BYTES] {
    let mut key = [0; PASSWORD_BYTES_MAX];
    let length = password.len().min(PASSWORD_BYTES_MAX);
    key[..length].copy_from_slice(&password[..length]);
    // A terminating zero belongs to it, where there is room.
    let key = &key[..(length + 1).min(PASSWORD_BYTES_MAX)];
    let whole = bcrypt::bcrypt(cost, salt, key);
    let mut stored = [0; HASH_BYTES];
    stored.copy_from_slice(&whole[..HASH_BYTES]);
    stored
}

/// `$2a$10$`, 22 characters of salt, 31 of hash; the letter may be another or missing.
fn parse(hash: &[u8]) -> Option<(u32, [u8; SALT_BYTES], [u8; HASH_BYTES])> {
    let rest = std::str::from_utf8(hash).ok()?.strip_prefix("$2")?;
    let rest = rest.strip_prefix('$').or_else(|| rest.get(1..)?.strip_prefix('$'))?;
    let (cost, rest) = rest.split_at_checked(2)?;
    let cost: u32 = cost.parse().ok().filter(|cost| COSTS.contains(cost))?;
    let rest = rest.strip_prefix('$')?;
    let (salt, hash) = rest.split_at_checked(SALT_CHARS)?;
    let hash = hash.get(..HASH_CHARS)?;
    let lenient = GeneralPurpose::new(
        &BCRYPT,
        LENIENT.with_decode_padding_mode(base64::engine::DecodePaddingMode::Indifferent),
    );
    Some((cost, lenient.decode(salt).ok()?.try_into().ok()?, lenient.decode(hash).ok()?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From Go's golang.org/x/crypto/bcrypt, the library that etcd uses.
    const ALLMINE: (&[u8], &[u8]) =
        (b"allmine", b"$2a$10$XajjQvNhvvRt5GSeFk1xFeyqRrsxkhBkUiQeg0dt.wU1qD4aFDcga");

    #[test]
    fn hashes_are_those_of_the_library_that_etcd_uses() {
        assert!(fits(ALLMINE.0, ALLMINE.1));
        assert!(!fits(b"allmin", ALLMINE.1) && !fits(b"", ALLMINE.1));
        let (_, salt, _) = parse(ALLMINE.1).expect("it is one");
        assert_eq!(hash(ALLMINE.0, 10, salt).expect("it is short"), ALLMINE.1);
    }

    #[test]
    fn what_is_no_hash_fits_no_password() {
        for bad in [
            "",
            "$",
            "$2",
            "$2a",
            "$2a$",
            "$2a$04$",
            "$2a$99$XajjQvNhvvRt5GSeFk1xFeyqRrsxkhBkUiQeg0dt.wU1qD4aFDcga",
            "secret",
        ] {
            assert!(!fits(b"", bad.as_bytes()) && !fits(b"secret", bad.as_bytes()), "{bad}");
        }
        assert!(!fits(b"\xff", b"\xff\xfe"));
    }

    #[test]
    fn long_passwords_are_refused_and_only_their_start_counts() {
        let salt = [7; SALT_BYTES];
        assert_eq!(hash(&[b'a'; 73], 4, salt), Err(TooLong));
        let longest = hash(&[b'a'; 72], 4, salt).expect("it fits");
        assert!(fits(&[b'a'; 72], &longest) && fits(&[b'a'; 80], &longest) && !fits(&[b'a'; 71], &longest));
        let empty = hash(b"", 4, salt).expect("it fits");
        assert!(fits(b"", &empty) && !fits(b"a", &empty));
    }

    #[test]
    fn given_hashes_are_read_as_go_reads_them() {
        assert_eq!(decode_hash("YWJj").as_deref(), Some(&b"abc"[..]));
        assert_eq!(decode_hash("YW\r\nJj").as_deref(), Some(&b"abc"[..]));
        assert_eq!(decode_hash("YWI=").as_deref(), Some(&b"ab"[..]));
        assert_eq!(decode_hash("").as_deref(), Some(&b""[..]));
        assert!(decode_hash("YWI").is_none() && decode_hash("!").is_none());
    }
}
