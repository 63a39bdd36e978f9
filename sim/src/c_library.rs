//! The C library's clock and random source, answered by the simulation on its thread.
//!
//! Every library in the process asks them, ours or not: hash seeds of the standard library, openraft's draws, HTTP/2's timers. So
//! nothing has to be told that it is simulated, and nothing can be forgotten. Other threads (RocksDB's) get the kernel's.

use std::cell::Cell;
use std::time::Duration;

/// Where simulated wall time begins: a day in 2025.
const WALL_SECONDS: u64 = 1_760_000_000;
/// Where simulated monotonic time begins; not at zero, for times before the start must have a place.
const MONOTONIC_SECONDS: u64 = 1_000_000;

thread_local! {
    static CHANCE: Cell<Option<u64>> = const { Cell::new(None) };
    static NOW: Cell<Option<Duration>> = const { Cell::new(None) };
}

/// Answers this thread from a seed, at time zero.
pub(crate) fn take_over(seed: u64) {
    CHANCE.set(Some(seed));
    NOW.set(Some(Duration::ZERO));
}

/// Sets this thread's time since the start.
pub(crate) fn set_now(now: Duration) {
    NOW.set(Some(now));
}

/// SplitMix64.
fn draw(state: u64) -> (u64, u64) {
    let state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (state, mixed ^ (mixed >> 31))
}

/// Takes the place of the C library's function.
///
/// # Safety
/// As for `getrandom(2)`: `buffer` must hold `length` bytes.
// SAFETY: the name is the C library's, and this has its signature and meaning.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getrandom(
    buffer: *mut libc::c_void,
    length: usize,
    flags: libc::c_uint,
) -> isize {
    let Some(mut state) = CHANCE.get() else {
        // SAFETY: the kernel checks its arguments, and the caller vouches for the buffer.
        let filled = unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, flags) };
        return isize::try_from(filled).unwrap_or(-1);
    };
    // SAFETY: the caller vouches for the buffer.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length) };
    for chunk in bytes.chunks_mut(8) {
        let drawn;
        (state, drawn) = draw(state);
        chunk.copy_from_slice(&drawn.to_le_bytes()[..chunk.len()]);
    }
    CHANCE.set(Some(state));
    length.cast_signed()
}

/// Takes the place of the C library's function.
///
/// # Safety
/// As for `clock_gettime(2)`: `time` must be valid for a write.
// SAFETY: the name is the C library's, and this has its signature and meaning.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn clock_gettime(
    clock: libc::clockid_t,
    time: *mut libc::timespec,
) -> libc::c_int {
    let start = match clock {
        libc::CLOCK_MONOTONIC => MONOTONIC_SECONDS,
        libc::CLOCK_REALTIME => WALL_SECONDS,
        _ => 0,
    };
    match NOW.get() {
        Some(now) if start > 0 => {
            let now = now + Duration::from_secs(start);
            let value = libc::timespec {
                tv_sec: libc::time_t::try_from(now.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: libc::c_long::from(now.subsec_nanos().cast_signed()),
            };
            // SAFETY: the caller vouches for the pointer.
            unsafe { time.write(value) };
            0
        }
        _ => {
            // SAFETY: the kernel checks its arguments.
            let status = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
            libc::c_int::try_from(status).unwrap_or(-1)
        }
    }
}
