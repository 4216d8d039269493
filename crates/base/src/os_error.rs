//! Texts of operating-system errors, as nginx prints them: `(2: No such file or directory)`.
//!
//! Invariant: the text never contains Rust's own suffix ` (os error 2)`, because log readers match on nginx's form.

use std::fmt;
use std::io;

/// Displays an I/O error in nginx's form, with the parentheses and without a leading space.
///
/// An error without an OS error number is shown as `(MESSAGE)`.
///
/// ```
/// let error = std::io::Error::from_raw_os_error(2);
/// let text = gale_base::os_error::OsErrorText(&error).to_string();
/// assert_eq!(text, "(2: No such file or directory)");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct OsErrorText<'e>(pub &'e io::Error);

impl fmt::Display for OsErrorText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = self.0.to_string();
        let Some(number) = self.0.raw_os_error() else {
            return write!(f, "({words})");
        };
        let suffix = format!(" (os error {number})");
        let words = words.strip_suffix(&suffix).unwrap_or(&words);
        write!(f, "({number}: {words})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_system_shows_its_number_and_words() {
        let error = io::Error::from_raw_os_error(13);
        assert_eq!(OsErrorText(&error).to_string(), "(13: Permission denied)");
    }

    #[test]
    fn an_error_without_a_number_shows_its_words() {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "no such name");
        assert_eq!(OsErrorText(&error).to_string(), "(no such name)");
    }
}
