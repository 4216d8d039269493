//! Variables: names in the configuration, indices at run time.
//!
//! A name that the configuration mentions gets an index when it is read. The
//! value is worked out when it is first needed, appended straight to where it
//! goes, and kept only where working it out again could give another answer.

use std::collections::HashMap;

use gale_config::Span;

use super::request::Request;

/// A variable, as an index into the configuration's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VariableId(pub u32);

/// Appends the value to the output and says whether there is one. The second
/// argument is the rest of the name of a variable such as `http_NAME`.
pub type Evaluate = fn(&Request, &[u8], &mut Vec<u8>) -> bool;

/// A variable that a module defines.
pub struct Variable {
    /// The name without its dollar sign; for a family (`http_`), the prefix.
    pub name: &'static str,
    /// Whether the name stands for every name that begins with it.
    pub is_prefix: bool,
    /// What its value is.
    pub value: Evaluate,
}

impl Variable {
    /// A variable of this very name.
    pub const fn named(name: &'static str, value: Evaluate) -> Variable {
        Variable { name, is_prefix: false, value }
    }

    /// All variables whose names begin with `prefix`.
    pub const fn family(prefix: &'static str, value: Evaluate) -> Variable {
        Variable { name: prefix, is_prefix: true, value }
    }
}

/// Whether a byte may stand in a variable's name.
pub fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// The variables of one configuration.
#[derive(Default)]
pub struct VariableTable {
    slots: Vec<Slot>,
    by_name: HashMap<Box<[u8]>, VariableId>,
    /// What modules define, for names that turn up only with requests.
    definitions: Vec<&'static Variable>,
}

struct Slot {
    name: Box<[u8]>,
    source: Source,
    mentioned_at: Option<Span>,
}

#[derive(Clone)]
pub(crate) enum Source {
    /// Mentioned, and nobody has defined it yet.
    Unknown,
    /// Worked out by a module.
    Evaluated { value: Evaluate, argument: Box<[u8]> },
    /// Set by the request's course, for example by a named group: without a
    /// value until then.
    Stored,
}

/// A variable that was looked up by its name.
pub(crate) enum Found {
    /// The configuration mentions it.
    Mentioned(VariableId),
    /// A module defines it.
    Defined(Source),
}

/// A variable that the configuration mentions and nobody defines.
#[derive(Debug)]
pub struct UnknownVariable {
    /// Its name.
    pub name: Box<[u8]>,
    /// Where it was first mentioned.
    pub span: Option<Span>,
}

impl VariableTable {
    /// The index for `name`, which the configuration mentions at `span`. Whether
    /// it exists is settled by [`VariableTable::resolve`].
    pub fn mention(&mut self, name: &[u8], span: Option<Span>) -> VariableId {
        // Names of variables are case-insensitive in nginx.
        let name = name.to_ascii_lowercase();
        if let Some(&id) = self.by_name.get(&*name) {
            return id;
        }
        let id = VariableId(u32::try_from(self.slots.len()).expect("fewer variables than 2^32"));
        let name: Box<[u8]> = name.into();
        self.by_name.insert(name.clone(), id);
        self.slots.push(Slot { name, source: Source::Unknown, mentioned_at: span });
        id
    }

    /// The index for a variable that the request's course sets.
    pub fn stored(&mut self, name: &[u8]) -> VariableId {
        let id = self.mention(name, None);
        self.slots[id.0 as usize].source = Source::Stored;
        id
    }

    /// Finds the definition of every variable that was mentioned.
    pub fn resolve<'d>(
        &mut self,
        definitions: impl Iterator<Item = &'d Variable> + Clone,
    ) -> Result<(), UnknownVariable> {
        for slot in &mut self.slots {
            if !matches!(slot.source, Source::Unknown) {
                continue;
            }
            slot.source = define(&slot.name, definitions.clone())
                .ok_or_else(|| UnknownVariable { name: slot.name.clone(), span: slot.mentioned_at })?;
        }
        Ok(())
    }

    /// Keeps what modules define for [`VariableTable::find`].
    pub(crate) fn keep_definitions(&mut self, definitions: impl Iterator<Item = &'static Variable>) {
        self.definitions = definitions.collect();
    }

    /// The variable of this name, in lower case, be it mentioned in the configuration or not.
    pub(crate) fn find(&self, name: &[u8]) -> Option<Found> {
        match self.by_name.get(name) {
            Some(&id) => Some(Found::Mentioned(id)),
            None => define(name, self.definitions.iter().copied()).map(Found::Defined),
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The name of a variable.
    pub fn name(&self, id: VariableId) -> &[u8] {
        &self.slots[id.0 as usize].name
    }

    pub(crate) fn source(&self, id: VariableId) -> &Source {
        &self.slots[id.0 as usize].source
    }
}

/// An exact name comes before a family; of families the longest prefix wins.
fn define<'d>(name: &[u8], definitions: impl Iterator<Item = &'d Variable>) -> Option<Source> {
    let mut best: Option<&Variable> = None;
    for candidate in definitions {
        if !candidate.is_prefix && candidate.name.as_bytes() == name {
            best = Some(candidate);
            break;
        }
        let is_longer = best.is_none_or(|best| best.name.len() < candidate.name.len());
        if candidate.is_prefix && name.starts_with(candidate.name.as_bytes()) && is_longer {
            best = Some(candidate);
        }
    }
    best.map(|found| Source::Evaluated {
        value: found.value,
        argument: if found.is_prefix { name[found.name.len()..].into() } else { [].into() },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nothing(_: &Request, _: &[u8], _: &mut Vec<u8>) -> bool {
        false
    }

    #[test]
    fn names_resolve_to_the_exact_definition_or_the_longest_family() {
        let definitions = [
            Variable::family("http_", nothing),
            Variable::named("http_host", nothing),
            Variable::family("http_x_", nothing),
        ];
        let mut table = VariableTable::default();
        let host = table.mention(b"HTTP_Host", None);
        let family = table.mention(b"http_x_y", None);
        assert_eq!(table.mention(b"http_host", None), host);
        table.resolve(definitions.iter()).unwrap();
        let argument = |id| match table.source(id) {
            Source::Evaluated { argument, .. } => argument.to_vec(),
            _ => panic!("not resolved"),
        };
        assert_eq!(argument(host), b"");
        assert_eq!(argument(family), b"y");
    }

    #[test]
    fn an_unknown_name_is_told() {
        let mut table = VariableTable::default();
        table.mention(b"nonsense", None);
        let error = table.resolve([].iter()).unwrap_err();
        assert_eq!(&*error.name, b"nonsense");
    }

    #[test]
    fn a_stored_variable_needs_no_definition() {
        let mut table = VariableTable::default();
        let id = table.mention(b"group", None);
        assert_eq!(table.stored(b"group"), id);
        table.resolve([].iter()).unwrap();
    }
}
