//! What a message is about: the client, the request, the server that it was passed to.
//!
//! It is described once. The text form appends it to the message as nginx does (`, client: 192.0.2.1, server: …`), the
//! JSON form makes a field of each part.

use std::fmt;

use super::json::JsonLine;

/// Takes the parts of a description.
pub trait Fields {
    /// One part: `before`, the value and `after` make the text form, `name` and the value the field.
    ///
    /// # Errors
    /// Those of the formatter.
    fn text(
        &mut self,
        before: &'static str,
        name: &'static str,
        value: &dyn fmt::Display,
        after: &'static str,
    ) -> fmt::Result;

    /// As [`Fields::text`], of a number.
    ///
    /// # Errors
    /// Those of the formatter.
    fn number(&mut self, before: &'static str, name: &'static str, value: u64) -> fmt::Result;
}

/// Something that messages are about.
pub trait Describe {
    /// Tells the parts, in the order of nginx's lines.
    ///
    /// # Errors
    /// Those of `fields`.
    fn describe(&self, fields: &mut impl Fields) -> fmt::Result;
}

/// [`Describe`] behind a pointer.
pub trait About {
    /// The text form.
    ///
    /// # Errors
    /// Those of the formatter.
    fn append_text(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result;

    /// The fields of a line of JSON.
    fn append_fields(&self, line: &mut JsonLine);
}

impl<T: Describe> About for T {
    fn append_text(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.describe(&mut Text(formatter))
    }

    fn append_fields(&self, line: &mut JsonLine) {
        // A line of JSON takes what it has room for, and never fails.
        let _ = self.describe(line);
    }
}

/// Nothing in particular.
impl Describe for () {
    fn describe(&self, _: &mut impl Fields) -> fmt::Result {
        Ok(())
    }
}

/// Shows the text form.
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
