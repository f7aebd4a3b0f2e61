//! A safe interface over `xl_export_c.h`: owners free what they own, and errors are `Err` with one sentence.

use std::any::Any;
use std::ffi::{c_char, c_void, CStr, CString};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};

#[repr(C)]
struct RawSession {
    _private: [u8; 0],
}

#[repr(C)]
struct RawMemory {
    _private: [u8; 0],
}

/// How to draw tokens, as `xl_generate_options`.
#[repr(C)]
pub struct GenerateOptions {
    pub max_tokens: i64,
    pub temperature: f64,
    pub top_k: i64,
    pub top_p: f64,
    pub min_p: f64,
    pub repetition_penalty: f64,
    pub presence_penalty: f64,
    pub frequency_penalty: f64,
    pub seed: u64,
    stop: *const c_char,
}

type Each = extern "C" fn(*mut c_void, i64, *const c_char, i64) -> i32;

extern "C" {
    fn xl_last_error() -> *const c_char;
    fn xl_open(folder: *const c_char, threads: i32, fused_library: *const c_char) -> *mut RawSession;
    fn xl_close(session: *mut RawSession);
    fn xl_check(session: *const RawSession, max_difference: *mut f64) -> i32;
    fn xl_encode(
        session: *const RawSession,
        text: *const c_char,
        num_bytes: i64,
        tokens: *mut i64,
        capacity: i64,
    ) -> i64;
    fn xl_start(session: *const RawSession, batch: i64) -> *mut RawMemory;
    fn xl_free(memory: *mut RawMemory);
    fn xl_default_options(session: *const RawSession) -> GenerateOptions;
    fn xl_generate(
        session: *const RawSession,
        memory: *mut RawMemory,
        prompt: *const i64,
        count: i64,
        options: *const GenerateOptions,
        each: Each,
        own: *mut c_void,
    ) -> i32;
}

fn last_error() -> String {
    unsafe { CStr::from_ptr(xl_last_error()) }.to_string_lossy().into_owned()
}

/// An artefact, opened.
pub struct Session(*mut RawSession);

/// The memory of one stream. It borrows its session, which must live longer.
pub struct Memory<'a>(*mut RawMemory, &'a Session);

impl Session {
    pub fn open(folder: &str, threads: i32) -> Result<Self, String> {
        let folder =
            CString::new(folder).map_err(|_| "the folder's name has a NUL; give another.".to_string())?;
        let raw = unsafe { xl_open(folder.as_ptr(), threads, std::ptr::null()) };
        if raw.is_null() {
            Err(last_error())
        } else {
            Ok(Self(raw))
        }
    }

    /// The largest difference from the reference in nats, and whether the check passed.
    pub fn check(&self) -> Result<(f64, bool), String> {
        let mut difference = 0.0;
        match unsafe { xl_check(self.0, &mut difference) } {
            passed @ 0..=1 => Ok((difference, passed == 1)),
            _ => Err(last_error()),
        }
    }

    /// The options that the artefact recommends.
    pub fn options(&self) -> GenerateOptions {
        unsafe { xl_default_options(self.0) }
    }

    pub fn encode(&self, text: &str) -> Result<Vec<i64>, String> {
        let (data, size) = (text.as_ptr().cast(), text.len() as i64);
        let call = |tokens: &mut [i64]| unsafe {
            xl_encode(self.0, data, size, tokens.as_mut_ptr(), tokens.len() as i64)
        };
        let mut tokens = vec![0; text.len() + 1];
        let mut count = call(&mut tokens);
        if count > tokens.len() as i64 {
            tokens.resize(count as usize, 0);
            count = call(&mut tokens);
        }
        if count < 0 {
            return Err(last_error());
        }
        tokens.truncate(count as usize);
        Ok(tokens)
    }

    pub fn start(&self) -> Result<Memory<'_>, String> {
        let raw = unsafe { xl_start(self.0, 1) };
        if raw.is_null() {
            Err(last_error())
        } else {
            Ok(Memory(raw, self))
        }
    }
}

impl Memory<'_> {
    /// Continues the stream after a prompt; `each` gets every token and its text, and returns false to stop.
    /// A panic of `each` ends the text, and resumes after the call.
    pub fn generate<F>(
        &mut self,
        prompt: &[i64],
        options: &GenerateOptions,
        mut each: F,
    ) -> Result<(), String>
    where
        F: FnMut(i64, &str) -> bool,
    {
        struct Called<'a, F> {
            each: &'a mut F,
            panic: Option<Box<dyn Any + Send>>,
        }
        // A panic must not pass through frames of C++, so it waits here until they have returned.
        extern "C" fn forward<F: FnMut(i64, &str) -> bool>(
            own: *mut c_void,
            token: i64,
            text: *const c_char,
            num_bytes: i64,
        ) -> i32 {
            let called = unsafe { &mut *own.cast::<Called<F>>() };
            let bytes = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), num_bytes as usize) };
            let work = || (called.each)(token, &String::from_utf8_lossy(bytes));
            match catch_unwind(AssertUnwindSafe(work)) {
                Ok(goes_on) => i32::from(goes_on),
                Err(panic) => {
                    called.panic = Some(panic);
                    0
                }
            }
        }
        let mut called = Called { each: &mut each, panic: None };
        let own: *mut c_void = std::ptr::addr_of_mut!(called).cast();
        let count = prompt.len() as i64;
        let ended =
            unsafe { xl_generate(self.1 .0, self.0, prompt.as_ptr(), count, options, forward::<F>, own) };
        if let Some(panic) = called.panic {
            resume_unwind(panic);
        }
        if ended < 0 {
            Err(last_error())
        } else {
            Ok(())
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        unsafe { xl_close(self.0) }
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        unsafe { xl_free(self.0) }
    }
}
