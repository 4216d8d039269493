//! Variables of a block while it is read, with the texts and regular expressions that refer to them.
//!
//! A directive that is implemented once for all protocols finds those of its block by the type of subject:
//! `builder.variables::<S>().template(word)`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use gale_config::{Diagnostic, Span, Word};

use super::regex::Regex;
use super::subject::Subject;
use super::template::Template;
use super::{Variable, VariableId, VariableTable};
use crate::configuration::{BlockBuilder, Builder};

/// Variables of a block, and their users.
pub struct VariablesDraft<S: 'static> {
    /// Variables referred to so far.
    pub table: VariableTable<S>,
    /// Regular expressions by text and case-insensitivity; many servers share the same ones.
    regexes: HashMap<(Box<[u8]>, bool), Regex>,
}

/// A block with variables of `S`.
pub trait HasVariables<S>: BlockBuilder {
    /// Its variables so far.
    fn variables(&mut self) -> &mut VariablesDraft<S>;
}

impl Builder {
    /// Variables of the block whose subjects are `S`.
    ///
    /// # Panics
    /// Panics outside of such a block.
    pub fn variables<S: Subject>(&mut self) -> &mut VariablesDraft<S> {
        self.block::<S::Block>().expect("inside of the block").variables()
    }
}

impl<S> Default for VariablesDraft<S> {
    fn default() -> VariablesDraft<S> {
        VariablesDraft { table: VariableTable::default(), regexes: HashMap::new() }
    }
}

impl<S> VariablesDraft<S> {
    /// Index of the variable of this name.
    pub fn variable(&mut self, name: &[u8], span: Option<Span>) -> VariableId {
        self.table.mention(name, span)
    }

    /// Compiles a text with variables.
    ///
    /// # Errors
    /// In nginx's words: a name is missing or not closed.
    pub fn template(&mut self, word: &Word) -> Result<Template<S>, Diagnostic> {
        let span = word.span;
        Template::compile(&word.text, |name| self.table.mention(name, Some(span)))
            .map_err(|message| Diagnostic::emerg(message).at(span))
    }

    /// Compiles a regular expression; its named groups become variables.
    ///
    /// # Errors
    /// PCRE2's message.
    pub fn regex(&mut self, word: &Word, expression: &[u8], caseless: bool) -> Result<Regex, Diagnostic> {
        let mut regex = match self.regexes.entry((expression.into(), caseless)) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(place) => {
                let compiled = Regex::compile(expression, caseless);
                place.insert(compiled.map_err(|error| Diagnostic::emerg(error).at(word.span))?).clone()
            }
        };
        regex.bind(|name| self.table.stored(name, Some(word.span)));
        Ok(regex)
    }

    /// Completes the table after the whole text was read. `definitions` are those of modules.
    ///
    /// # Errors
    /// A variable is used but not defined, or defined by both the configuration and a module.
    pub fn complete(
        self,
        definitions: impl Iterator<Item = &'static Variable<S>> + Clone,
    ) -> Result<VariableTable<S>, Diagnostic> {
        let mut table = self.table;
        table.resolve(definitions.clone()).map_err(|error| {
            let diagnostic = Diagnostic::emerg(error.message).at_opt(error.span);
            error.hint.into_iter().fold(diagnostic, Diagnostic::hint)
        })?;
        table.keep_definitions(definitions);
        Ok(table)
    }
}
