//! Backend files of etcd: damaged and arbitrary ones are read to an end, good ones are written anew.

#![no_main]

use std::cell::OnceCell;

use skeg::storage::etcd::fuzz;
use tempfile::TempDir;

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    thread_local! { static DIR: OnceCell<TempDir> = const { OnceCell::new() } }
    DIR.with(|dir| {
        let dir = dir.get_or_init(|| {
            // In memory where there is such a place: what is looked for does not depend on the disk.
            TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory")
        });
        fuzz::check(&dir.path().join("db"), script);
    });
});
