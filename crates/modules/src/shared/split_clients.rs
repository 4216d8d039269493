//! split_clients: a variable that divides clients into groups by a hash.
//!   split_clients STRING $VARIABLE { PERCENT% VALUE; ... [* VALUE;] }          http, stream
//! (<https://nginx.org/en/docs/http/ngx_http_split_clients_module.html>)
//!
//! The hash and the bounds of the groups are nginx's: a client is in the same group with nginx and with Gale.

use std::sync::Arc;

use gale_base::units;
use gale_config::{Body, Contexts, Custom, Diagnostic, Statement, Takes};
use gale_engine::configuration::Builder;
use gale_engine::module::Directive;
use gale_engine::variables::Definition;
use gale_engine::variables::subject::Subject;
use gale_engine::variables::template::Template;

use super::{check_row, variable_name};

/// Returns the directive for blocks in `contexts`.
pub const fn directive<S: Subject>(contexts: Contexts) -> Directive {
    Directive {
        name: "split_clients",
        contexts,
        takes: Takes::Exactly(2),
        body: Body::Block,
        default: "",
        about: "Creates a variable that splits clients into groups of given percentages.",
        store: &Custom(split_clients::<S>),
    }
}

/// 100 %, in hundredths of a percent.
const WHOLE: u64 = 10_000;

struct Split<S> {
    /// The text to hash.
    source: Template<S>,
    parts: Vec<Part>,
}

struct Part {
    /// Smaller hashes belong to this group or one before it; `None` for the rest.
    end: Option<u32>,
    value: Box<[u8]>,
}

impl<S: Subject> Definition<S> for Split<S> {
    fn append(&self, subject: &S, out: &mut Vec<u8>) -> bool {
        let hash = self.source.with_text(subject, murmur_hash2);
        if let Some(part) = self.parts.iter().find(|part| part.end.is_none_or(|end| hash < end)) {
            out.extend_from_slice(&part.value);
        }
        true
    }

    fn is_own(&self) -> bool {
        true
    }
}

fn split_clients<S: Subject>(_: &mut (), builder: &mut Builder, statement: &Statement) -> Result<(), Diagnostic> {
    let [source, variable] = statement.args.as_slice() else { unreachable!("two arguments") };
    let variables = builder.variables::<S>();
    let source = variables.template(source)?;
    let name = variable_name(variable)?;
    let mut shares = Vec::new();
    for row in statement.body() {
        shares.push(share(row)?);
    }
    let ends = ends(&shares).ok_or_else(|| {
        let end = statement.block_end.unwrap_or(statement.name.span);
        Diagnostic::emerg("percent total is greater than 100%").at(end)
    })?;
    let values = statement.body().iter().map(|row| row.args[0].text.as_slice().into());
    let parts = ends.into_iter().zip(values).map(|(end, value)| Part { end, value }).collect();
    variables.table.define(name, Some(variable.span), Arc::new(Split { source, parts }), false);
    Ok(())
}

/// Parses a group's size in hundredths of a percent; `None` for `*`.
fn share(row: &Statement) -> Result<Option<u64>, Diagnostic> {
    check_row(row)?;
    let key = &row.name;
    if row.args.len() != 1 {
        return Err(row.error("invalid number of the split_clients parameters"));
    }
    if key.text == "*" {
        return Ok(None);
    }
    let share = key.text.strip_suffix(b"%").and_then(|number| units::parse_fixed_point(number, 2));
    match share {
        Some(share) if share > 0 => Ok(Some(share)),
        _ => Err(Diagnostic::emerg(format!("invalid percent value \"{}\"", key.text)).at(key.span)),
    }
}

/// Returns the end of each group, or `None` if the sum exceeds 100 %. Sums are rounded as in nginx.
fn ends(shares: &[Option<u64>]) -> Option<Vec<Option<u32>>> {
    let mut sum = 0_u64;
    let mut last = 0_u32;
    let mut end = |share: &Option<u64>| {
        sum = share.map_or(WHOLE, |share| sum.saturating_add(share));
        match share {
            _ if sum > WHOLE => Err(()),
            Some(share) if sum < WHOLE => {
                last = last.wrapping_add((share * u64::from(u32::MAX) / WHOLE) as u32);
                Ok(Some(last))
            }
            _ => Ok(None),
        }
    };
    shares.iter().map(&mut end).collect::<Result<_, ()>>().ok()
}

/// MurmurHash2 by Austin Appleby, 32 bits, with nginx's seed.
fn murmur_hash2(text: &[u8]) -> u32 {
    const MULTIPLIER: u32 = 0x5bd1_e995;
    let (words, rest) = text.as_chunks::<4>();
    let mut hash = text.len() as u32;
    for word in words {
        let mut word = u32::from_le_bytes(*word).wrapping_mul(MULTIPLIER);
        word ^= word >> 24;
        hash = hash.wrapping_mul(MULTIPLIER) ^ word.wrapping_mul(MULTIPLIER);
    }
    if !rest.is_empty() {
        let tail = rest.iter().rev().fold(0, |tail, &byte| tail << 8 | u32::from(byte));
        hash = (hash ^ tail).wrapping_mul(MULTIPLIER);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(MULTIPLIER);
    hash ^ hash >> 15
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_algorithm() {
        let known = [
            ("", 0),
            ("a", 2456313694),
            ("ab", 446775395),
            ("abc", 324500635),
            ("abcd", 646393889),
            ("hello world", 1151865881),
            ("192.0.2.1", 3369748723),
        ];
        for (text, hash) in known {
            assert_eq!(murmur_hash2(text.as_bytes()), hash, "{text}");
        }
    }

    #[test]
    fn parts_end_where_nginx_ends_them() {
        assert_eq!(ends(&[Some(5_000), None]), Some(vec![Some(0x7fff_ffff), None]));
        assert_eq!(ends(&[Some(3_330), Some(3_330), None]), Some(vec![Some(1_430_224_109), Some(2_860_448_218), None]));
        // The group that completes 100 % gets the rest.
        assert_eq!(ends(&[Some(5_000), Some(5_000)]), Some(vec![Some(0x7fff_ffff), None]));
        assert_eq!(ends(&[Some(5_000), Some(5_001)]), None);
        assert_eq!(ends(&[None, Some(1)]), None);
        assert_eq!(ends(&[Some(u64::MAX), Some(u64::MAX)]), None);
        assert_eq!(ends(&[]), Some(vec![]));
    }
}
