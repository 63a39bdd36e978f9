//! Writes the descriptors of the contract to standard output, for `tests/contract`.

use std::io::{self, Write};

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(skeg_proto::FILE_DESCRIPTOR_SET)?;
    out.flush()
}
