//! The one seam through which time and chance enter the server.
//!
//! `clippy.toml` bans the standard clocks everywhere else, so this file is the list of what is not deterministic. `apply`
//! and everything it writes never call it: time reaches the replicated state only inside a proposed command.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Returns the monotonic time, for durations and deadlines.
#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub fn now() -> Instant {
    Instant::now()
}

/// Returns wall time in milliseconds since 1970, to be shown to people and put in logs. No decision may rest on it.
#[expect(clippy::disallowed_methods, reason = "this is the seam")]
pub fn unix_millis() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

/// Returns `N` bytes from the kernel's random source. Blocks only while the machine boots.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("the kernel's random source failed: {error}"),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_moves_forward_and_chance_differs() {
        let before = now();
        assert!(now() >= before);
        assert!(unix_millis() > 1_700_000_000_000, "the wall clock stands before 2023");
        assert_ne!(random::<16>(), random::<16>());
    }
}
