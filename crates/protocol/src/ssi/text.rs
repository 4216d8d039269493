//! Values in SSI commands: texts with variables, and the expressions of `if`.
//!
//! `\` escapes `\`, `'`, `"` and `$`; before any other character it stands for itself.

use bstr::BStr;

/// Appends `text` to `out`. `variable` appends the value of a variable, whose name is passed in lower case. An error is
/// nginx's message.
pub fn evaluate(text: &[u8], out: &mut Vec<u8>, mut variable: impl FnMut(&[u8], &mut Vec<u8>)) -> Result<(), String> {
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        at += 1;
        match byte {
            b'\\' => {
                let Some(&escaped) = text.get(at) else { return Ok(()) };
                at += 1;
                if !matches!(escaped, b'\\' | b'\'' | b'"' | b'$') {
                    out.push(b'\\');
                }
                out.push(escaped);
            }
            b'$' => {
                let (name, length) = name(text, &text[at..])?;
                variable(&name.to_ascii_lowercase(), out);
                at += length;
            }
            byte => out.push(byte),
        }
    }
    Ok(())
}

/// Returns the name after a dollar sign, and the length of its spelling.
fn name<'t>(text: &[u8], rest: &'t [u8]) -> Result<(&'t [u8], usize), String> {
    let inner = rest.strip_prefix(b"{");
    let start = inner.unwrap_or(rest);
    let length = start.iter().take_while(|&&byte| byte.is_ascii_alphanumeric() || byte == b'_').count();
    let name = &start[..length];
    let is_closed = inner.is_none() || start.get(length) == Some(&b'}');
    if start.is_empty() || (is_closed && name.is_empty()) {
        return Err(format!("invalid variable name in \"{}\"", BStr::new(text)));
    }
    if !is_closed {
        return Err(format!("the closing bracket in \"{}\" variable is missing", BStr::new(name)));
    }
    Ok((name, length + if inner.is_some() { 2 } else { 0 }))
}

/// The condition of `if` and `elif`. The texts are not evaluated yet.
#[derive(Debug, PartialEq, Eq)]
pub struct Expression {
    /// Left-hand side, in lower case.
    pub left: Vec<u8>,
    /// Comparison with the right-hand side. Without one the condition is true if the left-hand side is not empty.
    pub comparison: Option<Comparison>,
}

/// The right-hand side of an expression.
#[derive(Debug, PartialEq, Eq)]
pub struct Comparison {
    /// `!=` instead of `=`.
    pub is_negative: bool,
    /// `true` if the text is a regular expression: `/.../`.
    pub is_regex: bool,
    /// The text, or the regular expression between its slashes.
    pub text: Vec<u8>,
}

impl Expression {
    /// Parses an expression; `None` if it is invalid.
    pub fn parse(expression: &[u8]) -> Option<Expression> {
        let is_left =
            |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'$' | b'{' | b'}' | b'_' | b'"' | b'\'');
        let length = expression.iter().take_while(|&byte| is_left(byte)).count();
        let left = expression[..length].to_ascii_lowercase();
        let rest = skip_spaces(&expression[length..]);
        if rest.is_empty() {
            return Some(Expression { left, comparison: None });
        }
        let (is_negative, rest) = match rest.strip_prefix(b"=") {
            Some(rest) => (false, rest),
            None => (true, rest.strip_prefix(b"!=")?),
        };
        let (is_regex, text) = match skip_spaces(rest) {
            [b'/', inner @ .., last] => (true, if *last == b'/' { inner } else { return None }),
            [b'\\', b'/', ..] => (false, &skip_spaces(rest)[1..]),
            text => (false, text),
        };
        Some(Expression { left, comparison: Some(Comparison { is_negative, is_regex, text: text.into() }) })
    }
}

fn skip_spaces(text: &[u8]) -> &[u8] {
    let spaces = text.iter().take_while(|&&byte| byte == b' ').count();
    &text[spaces..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluated(text: &str) -> Result<String, String> {
        let mut out = Vec::new();
        evaluate(text.as_bytes(), &mut out, |name, out| {
            out.extend_from_slice(&[b"<", name, b">"].concat());
        })?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn variables_and_escapes_are_replaced() {
        assert_eq!(evaluated("plain").unwrap(), "plain");
        assert_eq!(evaluated("$A${b}c-$d_1.").unwrap(), "<a><b>c-<d_1>.");
        assert_eq!(evaluated(r#"\$a \" \' \\ \n"#).unwrap(), r#"$a " ' \ \n"#);
        assert_eq!(evaluated(r"$a\$b\").unwrap(), "<a>$b");
        assert_eq!(evaluated("$1").unwrap(), "<1>");
    }

    #[test]
    fn wrong_names_are_told_in_nginx_s_words() {
        for text in ["$", "a$", "$-", "${", "${}"] {
            assert_eq!(evaluated(text).unwrap_err(), format!("invalid variable name in \"{text}\""));
        }
        for text in ["${a", "${a-}"] {
            assert_eq!(evaluated(text).unwrap_err(), "the closing bracket in \"a\" variable is missing");
        }
    }

    #[test]
    fn expressions_are_taken_apart() {
        let parse = |text: &str| Expression::parse(text.as_bytes());
        let compared = |left: &str, is_negative, is_regex, text: &str| {
            let comparison = Some(Comparison { is_negative, is_regex, text: text.into() });
            Some(Expression { left: left.into(), comparison })
        };
        assert_eq!(parse("$A"), Some(Expression { left: b"$a".into(), comparison: None }));
        assert_eq!(parse("${a} "), Some(Expression { left: b"${a}".into(), comparison: None }));
        assert_eq!(parse(""), Some(Expression { left: Vec::new(), comparison: None }));
        assert_eq!(parse("$a = text $b"), compared("$a", false, false, "text $b"));
        assert_eq!(parse("Text!=$b"), compared("text", true, false, "$b"));
        assert_eq!(parse("$a = /re+/"), compared("$a", false, true, "re+"));
        assert_eq!(parse("$a = \\/a"), compared("$a", false, false, "/a"));
        assert_eq!(parse("$a ="), compared("$a", false, false, ""));
        assert_eq!(parse("$a = /"), compared("$a", false, false, "/"));
        for wrong in ["$a b", "$a == b"] {
            assert!(parse(wrong).is_none_or(|expression| expression.comparison.unwrap().text == b"= b"), "{wrong}");
        }
        for wrong in ["$a b", "$a ! b", "$a = /re", "(", "$a & b"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
