//! Password files: a line `USER:PASSWORD[:COMMENT]` for each user, and comments after `#`.
//!
//! Reading blocks, so it belongs in a thread. Memory use is bounded, whatever the size of the file or of a line.

use std::io::{self, BufRead, BufReader, Read};

use bstr::ByteSlice;
use gale_files::File;

/// Longer lines match no user: a truncated hash would be another password.
const LINE_BYTES_MAX: u64 = 16 * 1024;

/// Only this much of the file is read, and a line that crosses this limit is ignored: a quarter of a million users.
const FILE_BYTES_MAX: u64 = 32 * 1024 * 1024;

/// Size of the read buffer.
const PIECE_BYTES: usize = 64 * 1024;

/// Result of a search for a user.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The hashed password, from the first line that names the user.
    Password(Vec<u8>),
    /// No line names the user. Holds the first password of the file, if there is one, to spend the same time on it.
    Nobody(Option<Vec<u8>>),
}

pub(super) fn find(file: &File, user: &[u8]) -> io::Result<Found> {
    find_in(BufReader::with_capacity(PIECE_BYTES, Reader { file, offset: 0 }), FILE_BYTES_MAX, user)
}

struct Reader<'f> {
    file: &'f File,
    offset: u64,
}

impl Read for Reader<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read_blocking(self.offset, into)?;
        self.offset += count as u64;
        Ok(count)
    }
}

fn find_in(file: impl BufRead, bytes_max: u64, user: &[u8]) -> io::Result<Found> {
    let mut file = file.take(bytes_max);
    let mut line = Vec::new();
    let mut first = None;
    loop {
        line.clear();
        let count = (&mut file).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        if count == 0 {
            return Ok(Found::Nobody(first));
        }
        // A line without its end may be truncated, unless the file ends here.
        if line.last() != Some(&b'\n') && (count as u64 == LINE_BYTES_MAX || file.limit() == 0) {
            file.skip_until(b'\n')?;
            continue;
        }
        match user_and_password(&line) {
            Some((named, password)) if named == user => return Ok(Found::Password(password.to_vec())),
            Some((_, password)) if first.is_none() && !password.is_empty() => first = Some(password.to_vec()),
            _ => {}
        }
    }
}

fn user_and_password(line: &[u8]) -> Option<(&[u8], &[u8])> {
    if matches!(line.first(), Some(b'#' | b'\r')) {
        return None;
    }
    let (user, rest) = line.split_once_str(":")?;
    let end = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r' | b':')).unwrap_or(rest.len());
    Some((user, &rest[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str, user: &str) -> Option<String> {
        find_within(text, FILE_BYTES_MAX, user)
    }

    fn find_within(text: &str, bytes_max: u64, user: &str) -> Option<String> {
        let found = find_in(BufReader::with_capacity(7, text.as_bytes()), bytes_max, user.as_bytes()).unwrap();
        match found {
            Found::Password(password) => Some(String::from_utf8(password).unwrap()),
            Found::Nobody(_) => None,
        }
    }

    #[test]
    fn first_password_is_returned_for_an_unknown_user() {
        let first = |text: &str| find_in(text.as_bytes(), FILE_BYTES_MAX, b"x").unwrap();
        assert_eq!(first("#c:0\nb:\na:1:comment\nd:2\n"), Found::Nobody(Some(b"1".to_vec())));
        assert_eq!(first("nonsense\n"), Found::Nobody(None));
    }

    #[test]
    fn the_first_line_of_a_user_counts() {
        let text = "# a comment\n\na:1\r\nab:2:comment\n#b:3\nb:\na:4\nlast:5";
        assert_eq!(find(text, "a").as_deref(), Some("1"));
        assert_eq!(find(text, "ab").as_deref(), Some("2"));
        assert_eq!(find(text, "b").as_deref(), Some(""));
        assert_eq!(find(text, "last").as_deref(), Some("5"));
        for nobody in ["", "#b", "c", "las", "lastt"] {
            assert_eq!(find(text, nobody), None, "{nobody}");
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over() {
        let text = format!("a:1\n{}b:2\nc:3\n", "x".repeat(40_000));
        assert_eq!(find(&text, "c").as_deref(), Some("3"));
        assert_eq!(find(&text, "b"), None);
        assert_eq!(find(&text, &"x".repeat(20_000)), None);
    }

    #[test]
    fn a_password_that_is_cut_off_is_none() {
        let long = format!("a:{{PLAIN}}{}\nc:3\n", "s".repeat(LINE_BYTES_MAX as usize));
        assert_eq!(find(&long, "a"), None);
        assert_eq!(find(&long, "c").as_deref(), Some("3"));
        let text = "a:{PLAIN}secret\nb:2\n";
        assert_eq!(find_within(text, 10, "a"), None);
        assert_eq!(find_within(text, 16, "a").as_deref(), Some("{PLAIN}secret"));
        assert_eq!(find_within(text, 19, "b"), None);
        assert_eq!(find_within(text, 20, "b").as_deref(), Some("2"));
    }
}
