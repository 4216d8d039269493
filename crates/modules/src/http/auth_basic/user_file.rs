//! A password file: a line `USER:PASSWORD[:COMMENT]` for each user, and comments after `#`.
//!
//! Only where waiting is allowed. However large the file or a line of it is, little of it is in memory.

use std::io::{self, BufRead, BufReader, Read};

use gale_runtime::files::File;

/// Longer lines are nobody's.
const LINE_BYTES_MAX: u64 = 16 * 1024;

/// What lies behind is not looked at: a quarter of a million users.
const FILE_BYTES_MAX: u64 = 32 * 1024 * 1024;

/// How much is read at once.
const PIECE_BYTES: usize = 64 * 1024;

/// The hashed password of a user, from the first line that names it.
pub(super) fn find(file: &File, user: &[u8]) -> io::Result<Option<Vec<u8>>> {
    find_in(BufReader::with_capacity(PIECE_BYTES, Reader { file, offset: 0 }.take(FILE_BYTES_MAX)), user)
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

fn find_in(mut file: impl BufRead, user: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut file).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        if let Some(password) = password_of(&line, user) {
            return Ok(Some(password.to_vec()));
        }
        if line.len() as u64 == LINE_BYTES_MAX && line.last() != Some(&b'\n') {
            file.skip_until(b'\n')?;
        }
    }
}

fn password_of<'l>(line: &'l [u8], user: &[u8]) -> Option<&'l [u8]> {
    if matches!(line.first(), Some(b'#' | b'\r')) {
        return None;
    }
    let rest = line.strip_prefix(user)?.strip_prefix(b":")?;
    let end = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r' | b':')).unwrap_or(rest.len());
    Some(&rest[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(text: &str, user: &str) -> Option<String> {
        let found = find_in(BufReader::with_capacity(7, text.as_bytes()), user.as_bytes()).unwrap();
        found.map(|password| String::from_utf8(password).unwrap())
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
    }
}
