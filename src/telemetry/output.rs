//! The places that get log lines: standard error, standard output, files, the journal.
//!
//! A line is formatted once and written whole to each place, so that lines of several threads, or of several processes that
//! append to one file, do not mix. A place that fails is skipped: there is nowhere left to say so.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;

use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use super::{FATAL, LogError};
use crate::config::LogOutput;

/// Where journald listens.
const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";

/// Every place of one log.
#[derive(Clone)]
pub(super) struct Outputs(Arc<[Place]>);

enum Place {
    Stderr,
    Stdout,
    Journal(UnixDatagram),
    File(File),
}

/// One line on its way out, with the syslog priority that journald wants beside it.
pub(super) struct Line<'a> {
    outputs: &'a Outputs,
    priority: u8,
}

impl Outputs {
    /// Opens every place; files are appended to and made when missing.
    pub(super) fn open(outputs: &[LogOutput]) -> Result<Self, LogError> {
        outputs.iter().map(Place::open).collect::<Result<Vec<_>, _>>().map(|places| Self(places.into()))
    }

    /// Standard error alone; cannot fail.
    pub(super) fn stderr() -> Self {
        Self(Arc::new([Place::Stderr]))
    }
}

impl Place {
    fn open(output: &LogOutput) -> Result<Self, LogError> {
        Ok(match output {
            LogOutput::Stderr => Self::Stderr,
            LogOutput::Stdout => Self::Stdout,
            LogOutput::Journal => Self::Journal(journal().map_err(LogError::NoJournal)?),
            LogOutput::File(path) => Self::File(open_file(path)?),
        })
    }

    fn write(&self, line: &[u8], priority: u8) -> io::Result<()> {
        match self {
            Self::Stderr => io::stderr().lock().write_all(line),
            Self::Stdout => io::stdout().lock().write_all(line).and_then(|()| io::stdout().flush()),
            Self::File(file) => (&mut &*file).write_all(line),
            Self::Journal(socket) => match socket.send(&journal_entry(line, priority)) {
                Ok(_) => Ok(()),
                Err(_) => io::stderr().lock().write_all(line),
            },
        }
    }
}

fn open_file(path: &Path) -> Result<File, LogError> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .open(path)
        .map_err(|source| LogError::Open { path: path.to_owned(), source })
}

fn journal() -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(JOURNAL_SOCKET)?;
    Ok(socket)
}

/// Writes an entry of the journal's protocol. The message is given with its length, since it may hold a line break.
fn journal_entry(line: &[u8], priority: u8) -> Vec<u8> {
    let message = line.strip_suffix(b"\n").unwrap_or(line);
    let mut entry = format!("PRIORITY={priority}\nSYSLOG_IDENTIFIER=skeg\nMESSAGE\n").into_bytes();
    entry.extend_from_slice(&u64::try_from(message.len()).unwrap_or(u64::MAX).to_le_bytes());
    entry.extend_from_slice(message);
    entry.push(b'\n');
    entry
}

impl<'a> MakeWriter<'a> for Outputs {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { outputs: self, priority: 6 }
    }

    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> Line<'a> {
        let priority = match *metadata.level() {
            _ if metadata.target() == FATAL => 2,
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        Line { outputs: self, priority }
    }
}

impl Write for Line<'_> {
    /// Takes a whole line: the formatter hands over each event in one piece.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        for place in self.outputs.0.iter() {
            // An error of one place must not keep the line from the others.
            let _ = place.write(line, self.priority);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tracing_subscriber::fmt::MakeWriter;

    use super::{Outputs, journal_entry};
    use crate::config::LogOutput;

    #[test]
    fn files_are_appended_to() {
        let directory = tempfile::tempdir().unwrap();
        let (a, b) = (directory.path().join("a"), directory.path().join("b"));
        std::fs::write(&a, "old\n").unwrap();
        let outputs = Outputs::open(&[LogOutput::File(a.clone()), LogOutput::File(b.clone())]).unwrap();
        outputs.make_writer().write_all(b"new\n").unwrap();
        assert_eq!(std::fs::read_to_string(a).unwrap(), "old\nnew\n");
        assert_eq!(std::fs::read_to_string(b).unwrap(), "new\n");
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named() {
        let error = Outputs::open(&[LogOutput::File("/nowhere/at/all".into())]).err().unwrap();
        assert!(error.to_string().contains("--log-outputs /nowhere/at/all"), "{error}");
    }

    #[test]
    fn a_journal_entry_carries_priority_and_length() {
        let entry = journal_entry(b"a\nb\n", 4);
        assert_eq!(entry, b"PRIORITY=4\nSYSLOG_IDENTIFIER=skeg\nMESSAGE\n\x03\0\0\0\0\0\0\0a\nb\n");
    }
}
