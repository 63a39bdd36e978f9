//! Hashing passwords, where it holds up nobody: on threads of low priority, a few at a time, with a bound on who waits.
//!
//! A hash takes some 50 ms of a processor by design, so whoever sends passwords could else take all of them.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::sync::Semaphore;

use super::error::Error;
use crate::auth::password::{self, SALT_BYTES};
use crate::blocking::{self, Background};
use crate::clock;

/// Hashes at once: as many as the background has threads.
const AT_ONCE_MAX: usize = 4;
/// Who may wait; more are told that there are too many requests.
const WAITING_MAX: usize = 2048;

/// Hashes passwords.
pub struct Passwords {
    cost: u32,
    background: Background,
    permits: Semaphore,
    waiting: AtomicUsize,
}

impl Passwords {
    /// Hashes at this cost from now on.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(cost: u32) -> std::io::Result<Passwords> {
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
        Ok(Passwords {
            cost,
            background: Background::start("skeg-passwords")?,
            permits: Semaphore::new(processors.min(AT_ONCE_MAX)),
            waiting: AtomicUsize::new(0),
        })
    }

    /// Hashes a new password.
    ///
    /// # Errors
    /// [`Error::PasswordTooLong`], [`Error::TooManyRequests`], [`Error::Stopped`].
    pub(super) async fn hash(&self, password: String) -> Result<Bytes, Error> {
        let (cost, salt) = (self.cost, clock::random::<SALT_BYTES>());
        let hashed = self.run(move || password::hash(password.as_bytes(), cost, salt)).await?;
        hashed.map_err(|_| Error::PasswordTooLong)
    }

    /// True if the password fits the hash; for a user that does not exist it takes as long.
    ///
    /// # Errors
    /// [`Error::TooManyRequests`], [`Error::Stopped`].
    pub(super) async fn fits(&self, password: String, hash: Option<Bytes>) -> Result<bool, Error> {
        let cost = self.cost;
        let work = move || match hash {
            Some(hash) => password::fits(password.as_bytes(), &hash),
            None => {
                password::fits_nobody(password.as_bytes(), cost);
                false
            }
        };
        self.run(work).await
    }

    async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
        let _place = Place::take(&self.waiting)?;
        let _permit = self.permits.acquire().await.map_err(|_| Error::Stopped)?;
        // Work that has begun ends, also when the client has gone: it keeps its permit only as long as somebody waits, and the
        // threads are as many as the permits.
        let done = self.background.run(async move { blocking::spawn(work).await.ok() }).await;
        done.flatten().ok_or(Error::Stopped)
    }
}

/// A place among those who wait; given back when dropped.
struct Place<'w>(&'w AtomicUsize);

impl Place<'_> {
    fn take(waiting: &AtomicUsize) -> Result<Place<'_>, Error> {
        let before = waiting.fetch_add(1, Ordering::Relaxed);
        let place = Place(waiting);
        if before >= WAITING_MAX { Err(Error::TooManyRequests) } else { Ok(place) }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_password_fits_its_hash_alone() {
        let passwords = Passwords::start(4).unwrap();
        let hash = passwords.hash("sesame".into()).await.unwrap();
        assert!(hash.starts_with(b"$2a$04$"));
        assert!(passwords.fits("sesame".into(), Some(hash.clone())).await.unwrap());
        assert!(!passwords.fits("Sesame".into(), Some(hash)).await.unwrap());
        assert!(!passwords.fits("sesame".into(), None).await.unwrap());
        assert_eq!(passwords.hash("a".repeat(73)).await, Err(Error::PasswordTooLong));
        assert_eq!(passwords.waiting.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn more_than_may_wait_are_refused() {
        let passwords = Passwords::start(4).unwrap();
        passwords.waiting.store(WAITING_MAX, Ordering::Relaxed);
        assert_eq!(passwords.fits("a".into(), None).await, Err(Error::TooManyRequests));
        assert_eq!(passwords.waiting.load(Ordering::Relaxed), WAITING_MAX);
    }
}
