//! Arbitrary requests: what must hold is written in `src/api/fuzz.rs`.

#![no_main]

use std::cell::RefCell;

use skeg::api::fuzz::Checker;
use tempfile::TempDir;

thread_local! {
    static CHECKER: RefCell<Option<(Checker, TempDir)>> = const { RefCell::new(None) };
}

libfuzzer_sys::fuzz_target!(|script: &[u8]| {
    CHECKER.with_borrow_mut(|checker| {
        let (checker, _) = checker.get_or_insert_with(|| {
            // In memory where there is such a place: what is looked for does not depend on the disk.
            let dir = TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a directory");
            (Checker::new(dir.path()), dir)
        });
        checker.check(script);
    });
});
