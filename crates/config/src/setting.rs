//! A configuration value that remembers where it was written.
//!
//! It is written in this block, inherited from an outer one, or a default. The engine completes inheritance and
//! defaults of a block before anything reads its settings.
//! Invariant: `get` on an unset setting is a bug and panics.

use crate::diagnostic::Diagnostic;
use crate::source::Span;

/// A value with the place at which it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting<T> {
    state: Option<(T, Option<Span>)>,
}

impl<T> Setting<T> {
    /// An unset setting.
    pub const fn new() -> Self {
        Setting { state: None }
    }

    /// A setting with a value that was not written in any text.
    pub const fn of(value: T) -> Self {
        Setting { state: Some((value, None)) }
    }

    /// Returns the value.
    ///
    /// # Panics
    /// If it is unset: either the block is not finished, or the directive has no default and the caller should use
    /// [`get_opt`](Self::get_opt).
    #[track_caller]
    pub fn get(&self) -> &T {
        self.get_opt().expect("a setting is read before it is finished, or has no default")
    }

    /// Returns the value, if it is set.
    pub fn get_opt(&self) -> Option<&T> {
        self.state.as_ref().map(|(value, _)| value)
    }

    /// Returns the value for modification, if it is set.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        self.state.as_mut().map(|(value, _)| value)
    }

    /// Returns `true` if it is set: written, inherited or by default.
    pub fn is_set(&self) -> bool {
        self.state.is_some()
    }

    /// The place at which it was written; `None` if it is unset or a default.
    pub fn span(&self) -> Option<Span> {
        self.state.as_ref().and_then(|(_, span)| *span)
    }

    /// Sets the value, replacing any earlier one. A default has no span.
    pub fn set(&mut self, value: T, span: Option<Span>) {
        self.state = Some((value, span));
    }

    /// Unsets it and returns the value.
    pub fn take(&mut self) -> Option<T> {
        self.state.take().map(|(value, _)| value)
    }

    /// Creates an error about this value that points to its place.
    pub fn error(&self, message: impl Into<String>) -> Diagnostic {
        Diagnostic::emerg(message).at_opt(self.span())
    }
}

impl<T: Clone> Setting<T> {
    /// Copies the parent's value and place, if this setting is unset.
    pub fn inherit(&mut self, parent: &Setting<T>) {
        if self.state.is_none() {
            self.state.clone_from(&parent.state);
        }
    }
}

impl<T> Default for Setting<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::SourceId;

    const SPAN: Span = Span { source: SourceId(0), start: 1, end: 2 };

    #[test]
    fn an_unset_one_takes_the_parents_value_and_place() {
        let mut parent = Setting::new();
        parent.set(5, Some(SPAN));
        let mut child = Setting::new();
        child.inherit(&parent);
        assert_eq!((child.get(), child.span()), (&5, Some(SPAN)));
    }

    #[test]
    fn a_set_one_keeps_its_value() {
        let mut child = Setting::of(1);
        child.inherit(&Setting::of(2));
        assert_eq!(*child.get(), 1);
    }

    #[test]
    fn an_error_points_at_the_value() {
        let mut setting = Setting::new();
        setting.set((), Some(SPAN));
        assert_eq!(setting.error("wrong").span, Some(SPAN));
        assert_eq!(Setting::of(()).error("wrong").span, None);
    }

    #[test]
    #[should_panic(expected = "before it is finished")]
    fn reading_an_unset_one_is_a_bug() {
        Setting::<u8>::new().get();
    }
}
