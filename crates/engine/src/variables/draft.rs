//! The variables of a block while it is read, with the texts and the regular expressions that refer to them.
//!
//! A directive that is written once for all protocols finds those of its block by the subject:
//! `builder.variables::<S>().template(word)`.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use gale_config::{Diagnostic, Span, Word};

use super::regex::Regex;
use super::subject::Subject;
use super::template::Template;
use super::{Variable, VariableId, VariableTable};
use crate::configuration::{BlockBuilder, Builder};

/// The variables of a block, and what refers to them.
pub struct VariablesDraft<S: 'static> {
    /// The variables mentioned so far.
    pub table: VariableTable<S>,
    /// The regular expressions so far, by text and whether case matters not: many servers have the same ones.
    regexes: HashMap<(Box<[u8]>, bool), Regex>,
}

/// A block that has variables of `S`.
pub trait HasVariables<S>: BlockBuilder {
    /// What it has of them so far.
    fn variables(&mut self) -> &mut VariablesDraft<S>;
}

impl Builder {
    /// The variables of the block whose subjects are `S`.
    ///
    /// # Panics
    /// Outside of such a block.
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
    /// The variable of this name.
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

    /// Compiles a regular expression whose named groups become variables.
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

    /// The table when all of the text was read. `definitions` are what modules define.
    ///
    /// # Errors
    /// A variable that is mentioned and not defined, or made and defined.
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
