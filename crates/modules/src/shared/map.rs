//! map: a variable whose value depends on another variable.
//!   map STRING $VARIABLE { [volatile;] [hostnames;] [default VALUE;] [~[*]REGEX VALUE;] [include FILE;]
//!                          SOURCE VALUE; ... }                                                 http, stream
//! (<https://nginx.org/en/docs/http/ngx_http_map_module.html>)
//!
//! The cost of a lookup does not depend on the number of values, except for regular expressions, which are tried in
//! order. Equal values are stored once. If matching a regular expression fails with an error, the default value is
//! used.

use std::collections::HashMap;
use std::sync::Arc;

use bstr::ByteSlice;
use gale_base::log_level::Level;
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes, Word};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::server_name::{ServerName, ServerNames};
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;
use gale_engine::variables::{Definition, VariablesDraft};

use super::{check_row, variable_name};

/// Returns the directive for blocks in `contexts`.
pub const fn directive<S: Subject>(contexts: Contexts) -> Directive {
    Directive {
        name: "map",
        contexts,
        takes: Takes::Exactly(2),
        body: Body::Block,
        default: "",
        about: "Creates a variable whose value depends on other variables.",
        store: &Custom(map::<S>),
    }
}

/// Longer values are lower-cased in a buffer on the heap.
const KEY_BYTES_USUAL: usize = 128;

struct Map<S> {
    /// The value to look up.
    source: Template<S>,
    /// Keys, in lower case, with indices into the values.
    names: ServerNames<Entry>,
    values: Vec<Template<S>>,
    default: Option<usize>,
    has_hostnames: bool,
}

/// A key's value, and the key's own number: a duplicate key is an error even if the values are equal.
#[derive(Clone, Copy, PartialEq)]
struct Entry {
    value: usize,
    number: usize,
}

impl<S: Subject> Definition<S> for Map<S> {
    fn append(&self, subject: &S, out: &mut Vec<u8>) -> bool {
        let value = self.source.with_text(subject, |mut key| {
            if self.has_hostnames {
                key = key.strip_suffix(b".").unwrap_or(key);
            }
            self.find(subject, key).or(self.default)
        });
        if let Some(value) = value {
            self.values[value].append(subject, out);
        }
        true
    }

    fn is_own(&self) -> bool {
        self.values.iter().all(|value| value.as_constant().is_some())
    }
}

impl<S: Subject> Map<S> {
    fn find(&self, subject: &S, key: &[u8]) -> Option<usize> {
        let mut short = [0; KEY_BYTES_USUAL];
        let long;
        let lower = match short.get_mut(..key.len()) {
            Some(lower) => {
                lower.copy_from_slice(key);
                lower.make_ascii_lowercase();
                &*lower
            }
            None => {
                long = key.to_ascii_lowercase();
                &long
            }
        };
        if let Some(entry) = self.names.find_name(lower) {
            return Some(entry.value);
        }
        match self.names.find_regex(key) {
            Ok(found) => found.map(|(entry, matched)| {
                subject.take_match(matched, key);
                entry.value
            }),
            Err(error) => {
                subject.log(Level::Alert, format_args!("{error}"));
                None
            }
        }
    }
}

fn map<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let [source, variable] = statement.args.as_slice() else { unreachable!("two arguments") };
    let variables = builder.variables::<S>();
    let source = variables.template(source)?;
    let name = variable_name(variable)?;
    let map = Map { source, names: ServerNames::default(), values: Vec::new(), default: None, has_hostnames: false };
    let mut draft = Draft { map, known: HashMap::new(), is_volatile: false, count: 0 };
    let mut errors = Vec::new();
    for row in statement.body() {
        errors.extend(draft.add(variables, row).err());
    }
    variables.table.define(name, Some(variable.span), Arc::new(draft.map), draft.is_volatile);
    builder.note(errors);
    Ok(())
}

/// A map that is being parsed.
struct Draft<'s, S> {
    map: Map<S>,
    /// Indices of the values so far, by text.
    known: HashMap<&'s [u8], usize>,
    is_volatile: bool,
    count: usize,
}

impl<'s, S> Draft<'s, S> {
    fn add(&mut self, variables: &mut VariablesDraft<S>, row: &'s Statement) -> Result<(), Diagnostic> {
        check_row(row)?;
        let (key, value) = match (&**row.name.text, row.args.as_slice()) {
            (b"hostnames", []) => {
                self.map.has_hostnames = true;
                return Ok(());
            }
            (b"volatile", []) => {
                self.is_volatile = true;
                return Ok(());
            }
            (_, [value]) => (&row.name, value),
            _ => return Err(row.error("invalid number of the map parameters")),
        };
        let value = self.value(variables, value)?;
        if key.text == "default" {
            if self.map.default.replace(value).is_some() {
                return Err(row.error("duplicate default map parameter"));
            }
            return Ok(());
        }
        self.count += 1;
        let entry = Entry { value, number: self.count };
        let name = self.name(variables, key)?;
        let conflict = || {
            let key_text = key.text.to_ascii_lowercase();
            Diagnostic::emerg(format!("conflicting parameter \"{}\"", key_text.as_bstr())).at(key.span)
        };
        self.map.names.insert(name, entry).map_err(|_| conflict())
    }

    fn name(&self, variables: &mut VariablesDraft<S>, key: &Word) -> Result<ServerName, Diagnostic> {
        if let Some(expression) = key.text.strip_prefix(b"~") {
            let caseless = expression.strip_prefix(b"*");
            return variables.regex(key, caseless.unwrap_or(expression), caseless.is_some()).map(ServerName::Regex);
        }
        // A backslash marks a key that is not a keyword.
        let text = key.text.strip_prefix(b"\\").unwrap_or(&key.text);
        if !self.map.has_hostnames || text.starts_with(b"~") {
            return Ok(ServerName::Exact(text.to_ascii_lowercase().into()));
        }
        let invalid =
            |_| Diagnostic::emerg(format!("invalid hostname or wildcard \"{}\"", text.as_bstr())).at(key.span);
        ServerName::parse(text).map_err(invalid)
    }

    fn value(&mut self, variables: &mut VariablesDraft<S>, word: &'s Word) -> Result<usize, Diagnostic> {
        let text: &[u8] = &word.text;
        if let Some(&known) = self.known.get(text) {
            return Ok(known);
        }
        let number = self.map.values.len();
        self.map.values.push(variables.template(word)?);
        self.known.insert(text, number);
        Ok(number)
    }
}
