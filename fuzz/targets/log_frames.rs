//! Arbitrary files as a log. What must hold is written in `src/storage/log/fuzz.rs`.

#![no_main]

use std::cell::OnceCell;

use skeg::storage::log;
use tempfile::TempDir;

thread_local! {
    static DIR: OnceCell<TempDir> = const { OnceCell::new() };
}

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    DIR.with(|dir| {
        let dir = dir.get_or_init(|| {
            // In memory where there is such a place: what is looked for does not depend on the disk.
            TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory")
        });
        log::fuzz::check(dir.path(), script);
    });
});
