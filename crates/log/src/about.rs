//! Subject of a log message: the client, the request, the upstream server.
//!
//! It is described once. The text form appends it to the message as nginx does (`, client: 192.0.2.1, server: …`); the
//! JSON form makes each part a field.

use std::fmt;

use super::json::JsonLine;

/// Receiver of the parts of a description.
pub trait Fields {
    /// Adds a part: `before`, the value and `after` in the text form, `name` and the value as a field.
    ///
    /// # Errors
    /// Errors of the formatter.
    fn text(
        &mut self,
        before: &'static str,
        name: &'static str,
        value: &dyn fmt::Display,
        after: &'static str,
    ) -> fmt::Result;

    /// As [`Fields::text`], for a number.
    ///
    /// # Errors
    /// Errors of the formatter.
    fn number(&mut self, before: &'static str, name: &'static str, value: u64) -> fmt::Result;
}

/// A subject of log messages.
pub trait Describe {
    /// Passes the parts to `fields`, in the order of nginx's lines.
    ///
    /// # Errors
    /// Errors of `fields`.
    fn describe(&self, fields: &mut impl Fields) -> fmt::Result;
}

/// [`Describe`] behind a pointer.
pub trait About {
    /// The text form.
    ///
    /// # Errors
    /// Errors of the formatter.
    fn append_text(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result;

    /// Appends the fields of a JSON line.
    fn append_fields(&self, line: &mut JsonLine);
}

impl<T: Describe> About for T {
    fn append_text(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(&mut Text(formatter))
    }

    fn append_fields(&self, line: &mut JsonLine) {
        // A JSON line truncates values and never fails.
        let _ = self.describe(line);
    }
}

/// No subject.
impl Describe for () {
    fn describe(&self, _: &mut impl Fields) -> fmt::Result {
        Ok(())
    }
}

/// Displays the text form.
pub(super) struct TextOf<'a>(pub(super) &'a dyn About);

impl fmt::Display for TextOf<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.append_text(formatter)
    }
}

struct Text<'f, 'b>(&'f mut fmt::Formatter<'b>);

impl Fields for Text<'_, '_> {
    fn text(
        &mut self,
        before: &'static str,
        _: &'static str,
        value: &dyn fmt::Display,
        after: &'static str,
    ) -> fmt::Result {
        self.0.write_str(before)?;
        value.fmt(self.0)?;
        self.0.write_str(after)
    }

    fn number(&mut self, before: &'static str, _: &'static str, value: u64) -> fmt::Result {
        self.0.write_str(before)?;
        fmt::Display::fmt(&value, self.0)
    }
}
